"""Batches of requests that only their caller polls, such as those of one call of `generate`."""

from collections.abc import Iterable

from flowrl.engines.rollout.base import BatchingEngine, Request, RequestBatch, Response, RolloutEngine


def open_batch(engine: RolloutEngine) -> RequestBatch:
    """Returns an empty batch of requests. Its `poll` returns only the responses to its own requests."""
    return engine.open_batch() if isinstance(engine, BatchingEngine) else GeneratedTogether(engine)


class GeneratedTogether:
    """Requests to an engine without `open_batch`. `poll` generates the responses to all requests at once."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._requests: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def add(self, requests: Iterable[Request]) -> None:
        self._requests |= {request.request_id: request for request in requests}

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Returns the responses to all requests. Ignores the timeout."""
        requests, self._requests = list(self._requests.values()), {}
        return self._engine.generate(requests) if requests else []

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
