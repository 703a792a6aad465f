"""Client of a remote HTTP service that scores rows in batches."""

import asyncio
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

import httpx
import tenacity

from flowrl.config import ServiceConfig
from flowrl.rewards.reward_function import MAX_SCORE, Failure, Outcome, RewardError

_logger = logging.getLogger(__name__)

_MAX_RESPONSE_BYTES = 16 * 1024**2
_LINGER_S = 0.01
"""Time for which a request waits for further rows of its batch."""

_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
_PAUSE = tenacity.wait_exponential(multiplier=0.25, max=30) + tenacity.wait_random(0, 0.25)


class _ServiceError(Exception):
    """Raised if an attempt fails. Only attempts with `is_retried` are repeated."""

    def __init__(self, message: str, failure: Failure, *, is_retried: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.failure: Failure = failure
        self.is_retried, self.pause_s = is_retried, pause_s


@dataclass(eq=False)
class _Row:
    body: bytes
    """The row as JSON."""
    result: Future[Outcome] = field(default_factory=Future)


class RewardService:
    """Sends rows to a service in a background thread. `submit` can be called from any thread."""

    def __init__(self, config: ServiceConfig) -> None:
        """Starts the thread.

        Raises:
            RewardError: the environment variable of the token is missing, or variables such as `ALL_PROXY` are invalid.
        """
        self._config = config
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if config.token_variable is not None:
            if not (token := os.environ.get(config.token_variable, "").strip()):
                raise RewardError(
                    f"token_variable is {config.token_variable}, but the environment variable is missing or empty: set "
                    f"it on the machine of the driver, or remove token_variable"
                )
            headers["Authorization"] = f"Bearer {token}"
        self._client = _create_client(config, headers)
        self._rows: asyncio.Queue[_Row] = asyncio.Queue()
        self._open: set[_Row] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._error: str | None = None
        """Reason for which the thread has ended before `close`."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="reward service", daemon=True)
        self._thread.start()

    def submit(self, row: Mapping[str, Any]) -> Future[Outcome]:  # Any: values of JSON
        """Returns the future outcome of a row. The future has no exception: failures are part of the outcome."""
        try:
            body = json.dumps(row, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return _failed(f"the row cannot be sent as JSON ({error})", "invalid")
        entry = _Row(body)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client of the reward service is closed")
            if self._error is not None:
                return _failed(self._error, "raised")
            self._open.add(entry)
            self._loop.call_soon_threadsafe(self._rows.put_nowait, entry)
        return entry.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread. Rows without a score have the failure `closed`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._error is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._finish_all(Outcome(None, "closed", "the service was closed", num_attempts=0))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._send_all())
            except Exception as error:  # the boundary of the thread: each open row reports the failure
                _logger.warning("the client of the reward service has failed", exc_info=True)
                message = f"the client of {self._config.url} has failed ({_describe(error)})"
                with self._lock:
                    self._error = message
                self._finish_all(Outcome(None, "raised", message, num_attempts=0))

    async def _send_all(self) -> None:
        """Sends rows until the service is closed."""
        async with self._client as client, asyncio.TaskGroup() as group:
            senders = [group.create_task(self._send_batches(client)) for _ in range(self._config.max_concurrent)]
            await self._stop.wait()
            for sender in senders:
                sender.cancel()

    async def _send_batches(self, client: httpx.AsyncClient) -> None:
        while True:
            batch = [row for row in await self._next_batch() if row.result.set_running_or_notify_cancel()]
            if batch:
                outcomes = await self._score(client, batch)
                for row, outcome in zip(batch, outcomes, strict=True):
                    self._finish(row, outcome)

    async def _next_batch(self) -> list[_Row]:
        batch = [await self._rows.get()]
        if self._rows.empty() and self._config.batch_size > 1:
            await asyncio.sleep(_LINGER_S)
        while len(batch) < self._config.batch_size and not self._rows.empty():
            batch.append(self._rows.get_nowait())
        return batch

    def _finish(self, row: _Row, outcome: Outcome) -> None:
        with self._lock:
            self._open.discard(row)
        if not row.result.cancelled() and not row.result.done():
            row.result.set_result(outcome)

    def _finish_all(self, outcome: Outcome) -> None:
        with self._lock:
            rows = list(self._open)
        for row in rows:
            self._finish(row, outcome)

    async def _score(self, client: httpx.AsyncClient, batch: list[_Row]) -> list[Outcome]:
        """Returns the outcome of each row of a batch."""
        config = self._config
        body = b'{"rows": [' + b", ".join(row.body for row in batch) + b"]}"
        attempts = 0
        begun_s = time.monotonic()
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(config.retries + 1) | tenacity.stop_before_delay(config.deadline_s),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, _ServiceError) and error.is_retried),
            wait=_pause,
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            async with asyncio.timeout(config.deadline_s):
                async for attempt in retrying:
                    with attempt:
                        attempts += 1
                        begun_s = time.monotonic()
                        scores = await self._request(client, body, len(batch))
        except TimeoutError:
            outcome = Outcome(None, "timeout", f"{config.url} gave no score within {config.deadline_s:g} s")
        except _ServiceError as error:
            outcome = Outcome(None, error.failure, str(error))
        except Exception as error:  # such as an ExceptionGroup of httpx: only these rows have failed
            _logger.warning("a request to the reward service failed", exc_info=True)
            outcome = Outcome(None, "raised", f"the request to {config.url} failed ({_describe(error)})")
        else:
            seconds = time.monotonic() - begun_s
            return [replace(_read_score(score, config.url), seconds=seconds, num_attempts=attempts) for score in scores]
        return [replace(outcome, seconds=time.monotonic() - begun_s, num_attempts=attempts)] * len(batch)

    def _log_retry(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        _logger.warning("attempt %d to score rows failed: %s", state.attempt_number, error)

    async def _request(self, client: httpx.AsyncClient, body: bytes, num_rows: int) -> list[Any]:  # Any: JSON
        """Returns the scores of a batch. Raises _ServiceError."""
        url, timeout_s = self._config.url, self._config.timeout_s
        try:
            # The timeout of httpx holds for each read, so a slow service could exceed it.
            async with asyncio.timeout(timeout_s), client.stream("POST", url, content=body) as response:
                _check_status(response, url)
                content = bytearray()
                async for block in response.aiter_bytes():
                    content += block
                    if len(content) > _MAX_RESPONSE_BYTES:
                        limit = _MAX_RESPONSE_BYTES // 1024**2
                        raise _ServiceError(
                            f"the response of {url} has more than {limit} MiB", "corrupt", is_retried=False
                        )
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _ServiceError(f"{url} gave no response within {timeout_s:g} s", "timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _ServiceError(f"the request to {url} failed ({type(error).__name__}: {error})", "raised") from error
        return _read_scores(bytes(content), num_rows, url)


def _create_client(config: ServiceConfig, headers: Mapping[str, str]) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=config.max_concurrent)
    try:
        # A redirect could send the token to another host.
        return httpx.AsyncClient(headers=headers, timeout=config.timeout_s, limits=limits, follow_redirects=False)
    except (ImportError, ValueError, OSError) as error:
        raise RewardError(
            f"requests to {config.url} cannot be configured ({_describe(error)}): correct the environment variables "
            f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE, and the token"
        ) from error


def _describe(error: BaseException) -> str:
    """Returns the type and the text of an error, or of the first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _failed(message: str, failure: Failure) -> Future[Outcome]:
    result: Future[Outcome] = Future()
    result.set_result(Outcome(None, failure, message, num_attempts=0))
    return result


def _pause(state: tenacity.RetryCallState) -> float:
    """Returns the seconds before the next attempt: at least those in `Retry-After`."""
    error = state.outcome.exception() if state.outcome is not None else None
    return max(_PAUSE(state), error.pause_s if isinstance(error, _ServiceError) else 0.0)


def _check_status(response: httpx.Response, url: str) -> None:
    status = response.status_code
    if status == 200:
        return
    message = f"{url} responded with status {status} {response.reason_phrase}"
    if response.has_redirect_location:
        message += f" to {response.headers['location'][:200]}: set url to the new address"
    pause_s = _read_retry_after(response.headers.get("retry-after", ""))
    raise _ServiceError(message, "raised", is_retried=status in _RETRIED_STATUS, pause_s=pause_s)


def _read_retry_after(value: str) -> float:
    """Returns the pause in a header, which is a number of seconds or a date, or 0."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return 0.0
        seconds = (date - datetime.now(UTC)).total_seconds() if date.tzinfo is not None else 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _read_scores(content: bytes, num_rows: int, url: str) -> list[Any]:  # Any: JSON
    """Returns the list of scores in a response. Raises _ServiceError if the response is malformed."""
    try:
        scores = json.loads(content)["scores"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _ServiceError(f'the response of {url} is not {{"scores": [...]}} ({error!r})'[:500], "corrupt") from error
    if not isinstance(scores, list) or len(scores) != num_rows:
        count = f"{len(scores)} scores" if isinstance(scores, list) else type(scores).__name__
        raise _ServiceError(f"the response of {url} has {count} for {num_rows} rows", "corrupt")
    return scores


def _read_score(score: Any, url: str) -> Outcome:  # Any: JSON
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if is_number and abs(score) <= MAX_SCORE:  # false for NaN
        return Outcome(float(score))
    return Outcome(None, "invalid", f"{url} returned {str(score)[:200]}: return a finite number")
