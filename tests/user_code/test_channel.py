"""Requests between workers over sockets: order, errors, lost connections, keys, and dropped requests."""

import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Client
from typing import Any

import pytest

from flowrl.user_code.channel import RequestClient, RequestError, RequestServer, ServerAddress

KEY = b"k" * 32
OpenServer = Callable[..., RequestServer]


@pytest.fixture
def open_server() -> Iterator[OpenServer]:
    with ExitStack() as servers:

        def open_one(handle: Callable[[Any, Any], Future], port: int = 0) -> RequestServer:
            server = RequestServer("127.0.0.1", port, KEY, handle)
            servers.callback(server.close)
            return server

        yield open_one


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def receive_all(client: RequestClient) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    while client.num_in_flight:
        results |= dict(client.receive(None))
    return results


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_results_arrive_as_they_are_ready(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    release = threading.Event()

    def compute(value: int) -> int:
        if value == 0:
            release.wait()
        return value * 10

    server = open_server(lambda value, connection: executor.submit(compute, value))
    client = RequestClient([server.address], KEY)
    client.send(enumerate(range(4)))
    early: dict[Any, Any] = {}
    while len(early) < 3:
        early |= dict(client.receive(None))
    assert early == {1: 10, 2: 20, 3: 30} and client.num_in_flight == 1
    assert client.receive(0) == []
    release.set()
    assert receive_all(client) == {0: 0}
    client.close()


def test_requests_are_shared_by_the_servers(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    counts = [0, 0, 0]

    def counting(index: int) -> Callable[[Any, Any], Future]:
        def handle(value: Any, connection: object) -> Future:
            counts[index] += 1
            return executor.submit(str, value)

        return handle

    servers = [open_server(counting(index)) for index in range(3)]
    client = RequestClient([server.address for server in servers], KEY)
    client.send([(i, i) for i in range(30)])
    assert receive_all(client) == {i: str(i) for i in range(30)}
    assert counts == [10, 10, 10]
    client.close()


def test_an_error_of_a_request_is_raised_with_its_message(
    open_server: OpenServer, executor: ThreadPoolExecutor
) -> None:
    def fail(value: Any) -> Any:
        raise ValueError(f"row {value} is broken")

    client = RequestClient([open_server(lambda value, connection: executor.submit(fail, value)).address], KEY)
    client.send([("a", 7)])
    with pytest.raises(RequestError, match="row 7 is broken"):
        client.receive(None)
    client.close()


def test_an_error_of_the_handler_fails_only_its_request(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    def handle(value: Any, connection: object) -> Future:
        if value == 7:
            raise RuntimeError("the pool is closed")
        return executor.submit(int, value)

    client = RequestClient([open_server(handle).address], KEY)
    client.send([("a", 7)])
    with pytest.raises(RequestError, match="the pool is closed"):
        client.receive(60)
    client.send([("b", 8)])
    assert client.receive(60) == [("b", 8)]
    client.close()


class Unreadable:
    """Its pickle cannot be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class UnreadableFile:
    """Its pickle raises the class of errors that a lost connection raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/no/such/file",)


def test_the_server_is_told_about_the_end_of_a_connection(executor: ThreadPoolExecutor) -> None:
    used: list[Any] = []
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def handle(value: Any, connection: Any) -> Future:
        used.append(connection)
        return executor.submit(int, value)

    with closing(RequestServer("127.0.0.1", 0, KEY, handle, ended.put)) as server:
        first, second = (RequestClient([server.address], KEY) for _ in range(2))
        for client in (first, second):
            client.send([(1, 1), (2, 2)])
            receive_all(client)
        assert used[0] == used[1] != used[2] == used[3] and ended.empty()
        first.close()
        assert ended.get(timeout=60) == used[0]
        second.close()
        assert ended.get(timeout=60) == used[2]


def test_a_request_that_the_server_cannot_read_is_an_error(open_server: OpenServer) -> None:
    client = RequestClient([open_server(lambda value, connection: Future()).address], KEY)
    client.send([("a", Unreadable())])
    with pytest.raises(RequestError, match=r"cannot read a request.*not a number"):
        client.receive(60)
    client.close()


@pytest.mark.parametrize(("result", "cause"), [(Unreadable(), "not a number"), (UnreadableFile(), "/no/such/file")])
def test_a_result_that_cannot_be_read_is_an_error(
    result: object, cause: str, open_server: OpenServer, executor: ThreadPoolExecutor
) -> None:
    client = RequestClient([open_server(lambda value, connection: executor.submit(lambda: result)).address], KEY)
    client.send([("a", 1)])
    with pytest.raises(RequestError, match=f"cannot be read.*{cause}"):
        client.receive(3)
    client.close()


def test_a_result_that_cannot_be_sent_is_an_error(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    client = RequestClient(
        [open_server(lambda value, connection: executor.submit(lambda: threading.Lock())).address], KEY
    )
    client.send([("a", 1)])
    with pytest.raises(RequestError, match=r"the result cannot be sent.*lock"):
        client.receive(60)
    client.close()


def test_requests_are_repeated_after_a_lost_connection(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    first = open_server(lambda value, connection: Future())  # never answers
    port = first.address.port
    client = RequestClient([first.address], KEY)
    client.send([(i, i) for i in range(5)])
    first.close()
    second = open_server(lambda value, connection: executor.submit(int, value), port)
    assert second.address.port == port
    assert receive_all(client) == {i: i for i in range(5)}
    client.close()


def test_a_server_that_cannot_be_reached_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ServerAddress("127.0.0.1", free.getsockname()[1])
    with pytest.raises(RequestError, match=str(address.port)):
        RequestClient([address], KEY, reconnect_s=0.1)


def test_a_server_that_is_lost_for_good_is_an_error(open_server: OpenServer) -> None:
    server = open_server(lambda value, connection: Future())
    client = RequestClient([server.address], KEY, reconnect_s=0.5)
    client.send([(0, 0)])
    server.close()
    with pytest.raises(RequestError):
        client.receive(None)
    client.close()


def test_a_client_with_another_key_is_rejected_and_others_are_served(
    open_server: OpenServer, executor: ThreadPoolExecutor
) -> None:
    server = open_server(lambda value, connection: executor.submit(int, value))
    with pytest.raises(RequestError):
        RequestClient([server.address], b"another key", reconnect_s=0.1)
    # A client without authentication cannot send a value.
    with socket.create_connection((server.address.host, server.address.port)) as raw:
        raw.sendall(b"\0\0\0\4junk")
    client = RequestClient([server.address], KEY)
    client.send([(1, 1)])
    assert receive_all(client) == {1: 1}
    client.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0"], ids=["silent", "half a message"])
def test_a_client_without_a_handshake_is_closed_and_others_are_served(
    executor: ThreadPoolExecutor, sent: bytes
) -> None:
    def count_sessions() -> int:
        return sum(thread.name == "flowrl-channel-receive" for thread in threading.enumerate())

    before = count_sessions()
    server = RequestServer("127.0.0.1", 0, KEY, lambda value, _: executor.submit(str, value), handshake_s=0.5)
    with closing(server), ExitStack() as silent:
        address = (server.address.host, server.address.port)
        sockets = [silent.enter_context(socket.create_connection(address)) for _ in range(20)]
        for connected in sockets:
            connected.sendall(sent)
        with closing(RequestClient([server.address], KEY)) as client:
            client.send([("key", 1)])
            assert receive_all(client) == {"key": "1"}
            for connected in sockets:
                connected.settimeout(60)
                with suppress(ConnectionResetError):
                    while connected.recv(4096):  # the challenge of the server, then the end of the connection
                        pass
            # An authenticated connection has no time limit.
            client.send([("later", 2)])
            assert receive_all(client) == {"later": "2"}
            eventually(lambda: count_sessions() <= before + 1)
    eventually(lambda: count_sessions() <= before)


def test_a_server_that_does_not_respond_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the system accepts connections for it
        address = ServerAddress(*stopped.getsockname())
        with pytest.raises(RequestError, match=str(address.port)):
            RequestClient([address], KEY, reconnect_s=0.3)


def test_a_server_accepts_connections_again_after_too_many_open_files(
    open_server: OpenServer, executor: ThreadPoolExecutor
) -> None:
    server = open_server(lambda value, connection: executor.submit(int, value))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as clients:
        raw = [clients.enter_context(socket.socket()) for _ in range(4)]
        free = os.dup(raw[0].fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            for client in raw:
                client.connect((server.address.host, server.address.port))
            time.sleep(0.5)  # until the server has tried to accept them
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    client = RequestClient([server.address], KEY)
    client.send([(1, 1)])
    assert receive_all(client) == {1: 1}
    client.close()


def test_a_client_that_cannot_reach_all_servers_leaves_no_thread_behind(open_server: OpenServer) -> None:
    server = open_server(lambda value, connection: Future())
    with socket.create_server(("127.0.0.1", 0)) as stopped, pytest.raises(RequestError):
        RequestClient([server.address, ServerAddress(*stopped.getsockname())], KEY, reconnect_s=0.3)
    deadline = time.monotonic() + 60
    while "flowrl-channel-client" in thread_names() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "flowrl-channel-client" not in thread_names()


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_client_that_is_closed_while_it_connects_again_stays_closed(open_server: OpenServer) -> None:
    first = open_server(lambda value, connection: Future())
    client = RequestClient([first.address], KEY)
    first.close()
    time.sleep(0.05)  # the client tries to connect
    client.close()
    served: list[Any] = []

    def handle(value: Any, connection: object) -> Future:
        served.append(value)
        return Future()

    open_server(handle, first.address.port)
    deadline = time.monotonic() + 60
    while "flowrl-channel-client" in thread_names() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "flowrl-channel-client" not in thread_names() and not served


def test_results_of_dropped_requests_are_discarded(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    server = open_server(lambda value, connection: executor.submit(int, value))
    client = RequestClient([server.address], KEY)
    client.send([(i, i) for i in range(10)])
    client.drop([0, 1, "unknown"])
    assert receive_all(client) == {i: i for i in range(2, 10)}
    client.send([(0, 5)])  # the key is free again
    assert receive_all(client) == {0: 5}
    client.close()


def test_close_leaves_no_thread_behind(executor: ThreadPoolExecutor) -> None:
    before = threading.active_count()
    server = RequestServer("127.0.0.1", 0, KEY, lambda value, connection: executor.submit(int, value))
    client = RequestClient([server.address], KEY)
    client.close()
    server.close()
    with pytest.raises(OSError):
        Client((server.address.host, server.address.port), authkey=KEY)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_server_with_another_key_keeps_its_connections(open_server: OpenServer, executor: ThreadPoolExecutor) -> None:
    """A restarted run retains reward workers, and connects to them with another key."""
    server = open_server(lambda value, connection: executor.submit(int, value))
    old = RequestClient([server.address], KEY)
    server.key = b"another key"
    new = RequestClient([server.address], b"another key", reconnect_s=5.0)
    for client in (old, new):
        client.send([("a", 7)])
        assert receive_all(client) == {"a": 7}
        client.close()
