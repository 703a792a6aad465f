"""`RequestServer` and `RequestClient`: requests between workers over sockets, without the driver.

A server responds to each request with the result of a future, in any order. A client sends requests to several servers.
If a connection is lost, the client connects again and repeats the requests in flight, so requests must be idempotent.
With `lost_result`, the client sets this result instead. Client and server authenticate with a key of the run (HMAC)
before they read anything else. A server closes a connection that does not do so in time.
"""

import itertools
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from flowrl.config import UserError
from flowrl.config.user_errors import convert_errors, error_text

RECONNECT_S = 600.0
"""Seconds during which a client tries to connect to a server again. A lost process is replaced in this time, also on a
machine that is busy or imports slowly.
"""

HANDSHAKE_S = 30.0
"""Seconds in which a client must authenticate. A server closes a connection that has not."""

_RETRY_S = 0.2
"""Seconds between two attempts to connect, or to accept a connection."""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds without a message before a check of the other computer, seconds between checks, and failed checks after which
the connection is lost.
"""


class RequestError(UserError):
    """Raised by a client if a request failed on the server, or if the server cannot be reached."""


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server."""

    host: str
    port: int


class RequestServer:
    """Serves requests in threads.

    `handle` maps the value of a request and its connection to the future of the result. `on_disconnect` is called with
    a connection after its last request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        handle: Callable[[Any, Hashable], Future],
        on_disconnect: Callable[[Hashable], None] = lambda connection: None,
        *,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Listens on a port; 0 selects a free one. Raises OSError if the port is in use."""
        self._listener = socket.create_server((host, port), backlog=64)
        self.key = key
        """Key of later connections."""
        self._handle, self._on_disconnect, self._handshake_s = handle, on_disconnect, handshake_s
        self._connections: set[Connection] = set()
        self._is_closed = False
        self.address = ServerAddress(*self._listener.getsockname())
        self._accepting = threading.Thread(target=self._accept, name="flowrl-channel-accept", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection = _make_connection(self._listener.accept()[0])
                except OSError:  # a client that has gone, or too many open files for now
                    if not self._is_closed:
                        time.sleep(_RETRY_S)
                    continue
                self._connections.add(connection)
                # The handshake of a client would delay all others, so its session does it.
                _Session(connection, self.key, self._handle, self._remove, self._handshake_s).start()

    def _remove(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._on_disconnect(connection)

    def close(self) -> None:
        """Stops listening and ends all connections. Is idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # Closing a socket does not end its `accept`, but this does. It fails if the socket is already closed.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for connection in tuple(self._connections):
            _shut_down(connection)


def _make_connection(connected: socket.socket) -> Connection:
    """Returns the connection of a socket, which loses a computer that does not respond any more."""
    with connected:
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on all systems
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return Connection(connected.detach())


def _shut_down(connection: Connection) -> None:
    """Ends a connection whose thread is waiting for a message. The thread then closes it."""
    with suppress(OSError):
        shared = socket.socket(fileno=connection.fileno())
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.detach()


@contextmanager
def _time_limit(connection: Connection, timeout_s: float) -> Iterator[None]:
    """Ends a connection if the block takes longer, because messages have no time limit of their own."""
    limit = threading.Timer(timeout_s, _shut_down, [connection])
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
        limit.join()  # it must not use the number of a closed file


class _Session:
    """A connection of the server: one thread receives requests, and one thread sends results."""

    def __init__(
        self,
        connection: Connection,
        key: bytes,
        handle: Callable[[Any, Hashable], Future],
        forget: Callable[[Connection], None],
        handshake_s: float,
    ) -> None:
        self._connection, self._key, self._handle, self._on_close = connection, key, handle, forget
        self._handshake_s = handshake_s
        self._results: queue.SimpleQueue[tuple[Hashable, Any, str | None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        self._sending = threading.Thread(target=self._send, name="flowrl-channel-send", daemon=True)
        self._sending.start()
        threading.Thread(target=self._receive, name="flowrl-channel-receive", daemon=True).start()

    def _receive(self) -> None:
        try:
            # A wrong key or a lost connection concerns only this client.
            with suppress(OSError, EOFError, AuthenticationError):
                with _time_limit(self._connection, self._handshake_s):
                    deliver_challenge(self._connection, self._key)
                    answer_challenge(self._connection, self._key)
                while self._submit(self._connection.recv_bytes()):
                    pass
        finally:
            self._results.put(None)
            self._on_close(self._connection)
            # Closed after both threads have ended, because a closed connection has no handle.
            self._sending.join()
            self._connection.close()

    def _submit(self, message: bytes) -> bool:
        """Submits the requests of a message. Returns False if the message cannot be read."""
        try:
            requests = _decode(message, "the server cannot read a request")
        except RequestError as error:
            # The keys are unknown, so the client as a whole fails. Repeating the message would not help.
            self._results.put((None, None, str(error)))
            return False
        for key, value in requests:
            try:
                future = self._handle(value, self._connection)
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: fails only this request
                self._results.put((key, None, _describe(error)))
            else:
                future.add_done_callback(lambda future, key=key: self._add_result(key, future))
        return True

    def _add_result(self, key: Hashable, future: Future) -> None:
        error = future.exception()
        self._results.put((key, None, _describe(error)) if error is not None else (key, future.result(), None))

    def _send(self) -> None:
        with suppress(OSError):
            is_last = False
            while not is_last:
                # Results that are ready at the same time share one message.
                results = [self._results.get()]
                while not self._results.empty():
                    results.append(self._results.get())
                is_last = None in results
                self._connection.send_bytes(_encode([result for result in results if result is not None]))
        _shut_down(self._connection)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _decode(message: bytes, problem: str) -> Any:  # Any: the values of the sender
    """Returns the requests or results of a message. Raises RequestError, which begins with `problem`."""
    with convert_errors(lambda error: RequestError(f"{problem} ({error_text(error)})")):  # classes may raise anything
        return pickle.loads(message)


def _encode(results: Sequence[tuple[Hashable, Any, str | None]]) -> bytes:
    """Returns the message of results. A result that has no pickle becomes an error."""
    try:
        return pickle.dumps(results)
    except Exception as error:  # noqa: BLE001 - raised by a class of the result
        if len(results) > 1:
            return pickle.dumps([pickle.loads(_encode([result]))[0] for result in results])
        return pickle.dumps([(results[0][0], None, f"the result cannot be sent ({_describe(error)})")])


class RequestClient:
    """Sends requests to several servers, and collects their results.

    The server of a request is the one with the fewest requests in flight.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        key: bytes,
        *,
        reconnect_s: float = RECONNECT_S,
        lost_result: Any = None,  # Any: a result of the server
    ) -> None:
        """Connects to the servers. Raises RequestError if a server accepts no connection within `reconnect_s` seconds.

        After a lost connection, requests in flight are repeated. With `lost_result`, they get this result instead.
        """
        self._results: queue.SimpleQueue[tuple[Hashable, Any, str | None]] = queue.SimpleQueue()
        self._links: list[_Link] = []
        self._link_of: dict[Hashable, _Link] = {}
        try:
            for server in servers:
                self._links.append(_Link(server, key, self._results, reconnect_s, lost_result))
        except BaseException:  # nobody has the client yet, so nobody else closes its connections
            self.close()
            raise

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose results `receive` has not returned yet."""
        return len(self._link_of)

    def send(self, requests: Iterable[tuple[Hashable, Any]], servers: Iterable[int] | None = None) -> list[int]:
        """Sends requests, as pairs of a unique key and a value. Does not wait for results.

        `servers` has the index of the server for each request. Returns the index of the server of each request.
        """
        batches: dict[int, list[tuple[Hashable, Any]]] = {}
        chosen: list[int] = []
        for (key, value), server in zip(requests, itertools.repeat(None) if servers is None else servers, strict=False):
            index = self._least_busy(batches) if server is None else server
            self._link_of[key] = self._links[index]
            batches.setdefault(index, []).append((key, value))
            chosen.append(index)
        for index, batch in batches.items():
            self._links[index].send(batch)
        return chosen

    def _least_busy(self, batches: Mapping[int, Sequence[object]]) -> int:
        return min(range(len(self._links)), key=lambda i: self._links[i].num_in_flight + len(batches.get(i, ())))

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, Any]]:
        """Returns the keys and results that have arrived. Waits up to `timeout_s` for the first one (None: no limit).

        Ignores results of dropped requests. Raises RequestError if a request failed or a server cannot be reached.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results: list[tuple[Hashable, Any]] = []
        while self._link_of and not results:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                arrived = [self._results.get(timeout=left_s) if left_s != 0 else self._results.get_nowait()]
            except queue.Empty:
                break
            while not self._results.empty():
                arrived.append(self._results.get())
            for key, result, error in arrived:
                if error is not None and (key is None or key in self._link_of):
                    raise RequestError(error)
                if self._link_of.pop(key, None) is not None:
                    results.append((key, result))
        return results

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Discards the results of requests. Ignores unknown keys."""
        for key in keys:
            link = self._link_of.pop(key, None)
            if link is not None:
                link.drop(key)

    def close(self) -> None:
        for link in self._links:
            link.close()


class _Link:
    """A client's connection to one server."""

    def __init__(
        self, server: ServerAddress, key: bytes, results: "queue.SimpleQueue", reconnect_s: float, lost_result: Any
    ) -> None:
        self._server, self._key, self._results, self._reconnect_s = server, key, results, reconnect_s
        self._lost_result = lost_result
        self._in_flight: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection = self._connect()
        threading.Thread(target=self._receive, name="flowrl-channel-client", daemon=True).start()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def _connect(self) -> Connection:
        deadline = time.monotonic() + self._reconnect_s
        address = (self._server.host, self._server.port)
        while True:
            try:
                return self._open(max(_RETRY_S, deadline - time.monotonic()))
            except (OSError, EOFError, AuthenticationError) as error:
                if time.monotonic() >= deadline or self._is_closed:
                    raise RequestError(
                        f"the worker at {address[0]}:{address[1]} did not accept a connection within "
                        f"{self._reconnect_s:g} s ({type(error).__name__}: {error}): check the network between nodes"
                    ) from error
                time.sleep(_RETRY_S)

    def _open(self, timeout_s: float) -> Connection:
        """Returns a connection after the handshake. Raises OSError, EOFError or AuthenticationError."""
        connection = _make_connection(socket.create_connection((self._server.host, self._server.port), timeout_s))
        try:
            with _time_limit(connection, timeout_s):  # a stopped server accepts connections, but does not respond
                answer_challenge(connection, self._key)
                deliver_challenge(connection, self._key)
        except BaseException:  # nobody has the connection yet
            connection.close()
            raise
        return connection

    def send(self, requests: Sequence[tuple[Hashable, Any]]) -> None:
        with self._lock:
            self._in_flight.update(requests)
            # The thread that receives detects a lost connection, and repeats all requests in flight.
            with suppress(OSError):
                self._connection.send(list(requests))

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._in_flight.pop(key, None)

    def _receive(self) -> None:
        while True:
            try:
                self._add(_decode(self._connection.recv_bytes(), "a result cannot be read"))
            except (OSError, EOFError, RequestError) as error:
                if isinstance(error, RequestError):
                    self._results.put((None, None, str(error)))
                    self._is_closed = True
                with self._lock:
                    self._connection.close()
                if self._is_closed or not self._reconnect():
                    return

    def _add(self, results: Sequence[tuple[Hashable, Any, str | None]]) -> None:
        for key, result, error in results:
            with self._lock:
                if key is None:  # the server cannot read a request, so nothing is repeated
                    self._in_flight.clear()
                is_new = key is None or self._in_flight.pop(key, self) is not self
            if is_new:
                self._results.put((key, result, error))

    def _reconnect(self) -> bool:
        """Connects again and repeats the requests in flight, or sets their result. Returns False if the server cannot
        be reached.
        """
        try:
            connection = self._connect()
        except RequestError as error:
            self._results.put((None, None, str(error)))
            return False
        with self._lock:
            self._connection = connection
            if self._is_closed:  # after `close`, which has not seen this connection
                connection.close()
                return False
            if self._lost_result is not None:
                for key in self._in_flight:
                    self._results.put((key, self._lost_result, None))
                self._in_flight.clear()
            with suppress(OSError):
                connection.send(list(self._in_flight.items()))
        return True

    def close(self) -> None:
        self._is_closed = True
        _shut_down(self._connection)
