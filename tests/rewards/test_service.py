"""The client of a reward service, against real servers on the loopback interface that fail in many ways."""

import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ServiceConfig
from flowrl.rewards.reward_function import Outcome, RewardError
from flowrl.rewards.service import RewardService
from tests.slow_cases import as_parameters

Respond = Callable[["Handler", int, list[dict[str, Any]]], None]
"""Responds to a request with a number (from 1) and rows."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        rows = json.loads(body)["rows"]
        number = self.server.record(self, rows)
        try:
            self.server.respond(self, number, rows)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.num_running -= 1

    def send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_scores(self, rows: list[dict[str, Any]]) -> None:
        self.send(json.dumps({"scores": [row["x"] / 2 for row in rows]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, respond: Respond, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.respond, self.lock = respond, threading.Lock()
        self.requests: list[tuple[float, int, str | None]] = []
        """Time, number of rows and authorization of each request."""
        self.num_running = self.max_running = 0

    def record(self, handler: Handler, rows: list[Any]) -> int:
        with self.lock:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            self.requests.append((time.monotonic(), len(rows), handler.headers["Authorization"]))
            return len(self.requests)

    def handle_error(self, *_: Any) -> None:  # connections that a test resets
        pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


@contextmanager
def serve(respond: Respond, port: int = 0) -> Iterator[Server]:
    with Server(respond, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def connect(url: str, **settings: Any) -> RewardService:
    return RewardService(ServiceConfig.model_validate({"url": url, **settings}))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def scores(handler: Handler, number: int, rows: list[dict[str, Any]]) -> None:
    handler.send_scores(rows)


def outcomes(server: Server, num_rows: int, **settings: Any) -> list[Outcome]:
    with connect(server.url, **settings) as service:
        futures = [service.submit({"x": x}) for x in range(num_rows)]
        return [future.result(60) for future in futures]


def test_rows_are_scored_in_batches() -> None:
    with serve(scores) as server:
        results = outcomes(server, 100, batch_size=16, max_concurrent=2)
        assert [result.score for result in results] == [x / 2 for x in range(100)]
        assert all(result.failure is None and result.num_attempts == 1 for result in results)
        sizes = [size for _, size, _ in server.requests]
        assert max(sizes) <= 16 and sum(sizes) == 100 and len(sizes) < 50
        assert server.max_running <= 2


def test_rows_of_many_threads_keep_their_score() -> None:
    with serve(scores) as server, connect(server.url, batch_size=7) as service:
        results: dict[int, Future[Outcome]] = {}

        def submit(start: int) -> None:
            for x in range(start, start + 50):
                results[x] = service.submit({"x": x, "response": "ü\ud800"})

        threads = [threading.Thread(target=submit, args=(50 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {x: future.result(60).score for x, future in results.items()} == {x: x / 2 for x in range(400)}


def reset(handler: Handler) -> None:
    """Ends the connection with a reset."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def cut(handler: Handler) -> None:
    """Ends the connection within the response."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [')
    handler.close_connection = True


FAILURES: dict[str, tuple[Callable[[Handler], None], str]] = {
    "500": (lambda handler: handler.send(b"{}", 500), "raised"),
    "503": (lambda handler: handler.send(b"", 503), "raised"),
    "429": (lambda handler: handler.send(b"", 429, Retry_After="0"), "raised"),
    "408": (lambda handler: handler.send(b"", 408, Retry_After="soon"), "raised"),
    "reset": (reset, "raised"),
    "incomplete": (cut, "raised"),
    "not JSON": (lambda handler: handler.send(b"<html>"), "corrupt"),
    "not an object": (lambda handler: handler.send(b"[1.0]"), "corrupt"),
    "not UTF-8": (lambda handler: handler.send(b'{"scores": ["\xff"]}'), "corrupt"),
    "too few scores": (lambda handler: handler.send(b'{"scores": []}'), "corrupt"),
    "too many scores": (lambda handler: handler.send(b'{"scores": [1, 2]}'), "corrupt"),
    "scores are no list": (lambda handler: handler.send(b'{"scores": "ab"}'), "corrupt"),
    "deep": (lambda handler: handler.send(b"[" * 100_000), "corrupt"),
}


@pytest.mark.parametrize("name", as_parameters(FAILURES, "429", "reset", "too few scores"))
def test_a_failed_attempt_is_repeated(name: str) -> None:
    fail, _ = FAILURES[name]
    with serve(lambda handler, number, rows: fail(handler) if number < 3 else handler.send_scores(rows)) as server:
        (result,) = outcomes(server, 1)
        assert (result.score, result.failure, result.num_attempts) == (0.0, None, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_service_that_always_fails_costs_its_retries(name: str) -> None:
    fail, failure = FAILURES[name]
    with serve(lambda handler, number, rows: fail(handler)) as server:
        (result,) = outcomes(server, 1, retries=1)
        assert (result.score, result.failure, result.num_attempts) == (None, failure, 2)
        assert server.url in result.message and len(server.requests) == 2


PERMANENT: dict[str, tuple[Callable[[Handler], None], str]] = {
    "400": (lambda handler: handler.send(b"", 400), "400"),
    "401": (lambda handler: handler.send(b"", 401), "401"),
    "404": (lambda handler: handler.send(b"", 404), "404"),
    "redirect": (lambda handler: handler.send(b"", 307, Location="http://192.0.2.1/score"), "http://192.0.2.1/score"),
    "huge": (lambda handler: handler.send(b" " * (17 * 1024**2)), "16"),
}


@pytest.mark.parametrize("name", PERMANENT)
def test_a_permanent_failure_is_not_repeated(name: str) -> None:
    fail, fact = PERMANENT[name]
    with serve(lambda handler, number, rows: fail(handler)) as server:
        (result,) = outcomes(server, 1)
        assert result.score is None and fact in result.message
        assert result.num_attempts == len(server.requests) == 1


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e30", b"null", b'"1"', b"true", b"[1]"])
def test_an_invalid_score_costs_only_its_row(value: bytes) -> None:
    values = [b"1", value, b"3.5"]

    def respond(handler: Handler, number: int, rows: list[dict[str, Any]]) -> None:
        handler.send(b'{"scores": [%s]}' % b", ".join(values[row["x"]] for row in rows))

    with serve(respond) as server:
        results = outcomes(server, 3, batch_size=3, max_concurrent=1)
        assert [result.score for result in results] == [1.0, None, 3.5]
        assert results[1].failure == "invalid"


@pytest.mark.parametrize(
    "value",
    [lambda: "1", lambda: formatdate(math.ceil(time.time()) + 1, usegmt=True)],  # a date has whole seconds
    ids=["seconds", "date"],
)
def test_the_pause_is_at_least_retry_after(value: Callable[[], str]) -> None:
    def respond(handler: Handler, number: int, rows: list[Any]) -> None:
        handler.send(b"", 503, Retry_After=value()) if number == 1 else handler.send_scores(rows)

    with serve(respond) as server:
        (result,) = outcomes(server, 1)
        assert result.num_attempts == 2
        assert server.requests[1][0] - server.requests[0][0] >= 1.0


def test_pauses_grow() -> None:
    with serve(lambda handler, number, rows: handler.send(b"", 500)) as server:
        outcomes(server, 1, retries=3)
        pauses = [later - earlier for (earlier, *_), (later, *_) in pairwise(server.requests)]
        assert len(pauses) == 3
        assert all(pause >= least for pause, least in zip(pauses, (0.25, 0.5, 1.0), strict=True))


def test_a_slow_response_is_repeated_at_its_timeout() -> None:
    def respond(handler: Handler, number: int, rows: list[Any]) -> None:
        if number == 1:
            handler.send_response(200)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            for _ in range(50):  # each read is fast, but the response is not
                handler.wfile.write(b" ")
                time.sleep(0.1)
        else:
            handler.send_scores(rows)

    with serve(respond) as server:
        (result,) = outcomes(server, 1, timeout_s=1.0)
        assert (result.score, result.num_attempts) == (0.0, 2)
        (result,) = outcomes(server, 1, timeout_s=30.0)
        assert result.failure is None


def test_the_deadline_holds_over_all_attempts() -> None:
    with serve(lambda handler, number, rows: handler.send(b"", 503, Retry_After="3600")) as server:
        (result,) = outcomes(server, 1, deadline_s=5.0)
        assert result.score is None and len(server.requests) == 1
    with serve(lambda handler, number, rows: time.sleep(3)) as server:
        (result,) = outcomes(server, 1, deadline_s=0.5)
        assert result.failure == "timeout" and "0.5" in result.message


def test_a_refused_connection_is_repeated_until_the_service_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with connect(f"http://127.0.0.1:{port}/score", retries=0) as service:
        refused = service.submit({"x": 1}).result(60)
        assert refused.failure == "raised" and str(port) in refused.message
    with connect(f"http://127.0.0.1:{port}/score", retries=20) as service:
        result = service.submit({"x": 1})
        time.sleep(0.5)

        with serve(scores, port):
            outcome = result.result(60)
    assert outcome.score == 0.5 and outcome.num_attempts > 1


@pytest.mark.slow
def test_an_unreliable_service_scores_all_rows() -> None:
    fails = [fail for fail, _ in FAILURES.values()]

    def respond(handler: Handler, number: int, rows: list[Any]) -> None:
        handler.send_scores(rows) if number % 2 == 0 else fails[number % len(fails)](handler)

    with serve(respond) as server:
        results = outcomes(server, 30, batch_size=4, max_concurrent=4, retries=30)
        assert [result.score for result in results] == [x / 2 for x in range(30)]


def test_the_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORES_TOKEN", "secret")
    with serve(scores) as server:
        outcomes(server, 1, token_variable="SCORES_TOKEN")
        outcomes(server, 1)
        assert [token for _, _, token in server.requests] == ["Bearer secret", None]
        monkeypatch.delenv("SCORES_TOKEN")
        with pytest.raises(RewardError, match="SCORES_TOKEN"):
            RewardService(ServiceConfig(url=server.url, token_variable="SCORES_TOKEN"))


def test_a_row_that_is_not_json_costs_only_itself() -> None:
    with serve(scores) as server, connect(server.url) as service:
        results = [service.submit(row) for row in ({"x": 2}, {"x": object()}, {"x": float("nan")}, {"x": 4})]
        assert [future.result(60).score for future in results] == [1.0, None, None, 2.0]
        assert [future.result().failure for future in results[1:3]] == ["invalid", "invalid"]


def wait_for(event: threading.Event) -> None:
    event.wait(60)


def test_close_ends_open_rows() -> None:
    release = threading.Event()
    with serve(lambda handler, number, rows: wait_for(release)) as server:
        service = RewardService(ServiceConfig(url=server.url, batch_size=1, max_concurrent=2))
        futures = [service.submit({"x": x}) for x in range(10)]
        while len(server.requests) < 2:
            time.sleep(0.01)
        service.close()
        service.close()
        assert wait(futures, 0).not_done == set()
        assert [future.result().failure for future in futures] == ["closed"] * 10
        with pytest.raises(RuntimeError, match="closed"):
            service.submit({"x": 1})
        release.set()


def test_a_canceled_row_is_not_sent() -> None:
    release = threading.Event()

    def respond(handler: Handler, number: int, rows: list[Any]) -> None:
        release.wait(60)
        handler.send_scores(rows)

    with serve(respond) as server, connect(server.url, batch_size=1, max_concurrent=1) as service:
        first = service.submit({"x": 2})
        while not server.requests:
            time.sleep(0.01)
        second = service.submit({"x": 4})
        assert second.cancel()
        release.set()
        assert first.result(60).score == 1.0
        assert service.submit({"x": 6}).result(60).score == 3.0
        assert len(server.requests) == 2


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host/x", "http://", "http://user:word@host/", "http://a b/"])
def test_a_malformed_address_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        ServiceConfig(url=url)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "x"])
def test_an_invalid_port_is_rejected(port: str) -> None:
    with pytest.raises(ValueError, match="port"):
        ServiceConfig(url=f"http://127.0.0.1:{port}/score")


@pytest.mark.parametrize("url", ["http://host/x", "http://[::1]:65535/x", "https://host:1"])
def test_an_address_may_have_a_port(url: str) -> None:
    assert ServiceConfig(url=url).url == url


def test_an_unexpected_error_costs_only_the_rows_of_its_request() -> None:
    config = ServiceConfig.model_construct(url="http://127.0.0.1:99999/score")  # the check would reject the port
    with RewardService(config) as service:
        for _ in range(2):
            outcome = service.submit({"x": 1}).result(60)
            assert outcome.failure == "raised"
            assert "99999" in outcome.message and "\n" not in outcome.message


def test_a_failed_thread_ends_open_and_later_rows() -> None:
    release = threading.Event()
    with serve(lambda handler, number, rows: wait_for(release)) as server, connect(server.url) as service:
        future = service.submit({"x": 1})
        while not server.requests:
            time.sleep(0.01)
        service._loop.call_soon_threadsafe(service._loop.stop)
        assert future.result(60).failure == "raised"
        assert service.submit({"x": 1}).result(60).failure == "raised"
        release.set()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "unknown://127.0.0.1:1"])
def test_an_invalid_proxy_is_reported(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # without the optional library for socks
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(RewardError, match="ALL_PROXY"):
        connect("http://127.0.0.1:1/score")


SCORE_A_ROW = """
import sys
sys.modules |= {"httpx": None, "tenacity": None}
from flowrl.config import RewardConfig
from flowrl.rewards.row_scorer import RowScorer

if __name__ == "__main__":
    scorer = RowScorer(RewardConfig(function="flowrl.rewards.gsm8k:score"), workers=1)
    print(scorer.submit({"response": "#### 2", "answer": "2"}).result(60).values)
    scorer.close()
"""


@pytest.mark.slow
def test_a_reward_function_needs_no_package_of_the_client(tmp_path: Path) -> None:
    """Also covers the workers: `flowrl.rewards.row_scorer` is the only module that imports the client."""
    program = tmp_path / "program.py"
    program.write_text(SCORE_A_ROW)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.stdout == "{'scores': 1.0}\n", done.stderr
