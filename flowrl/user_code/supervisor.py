"""`Supervisor`: runs processes of user code in one thread, and ends those that misbehave.

It starts processes, has them load code, sends calls, and detects late calls and ended processes. It knows neither
rewards nor environments: a `Work` decides which process gets which call, and what an end means for the calls in flight.
"""

import contextlib
import itertools
import json
import math
import os
import select
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from flowrl.user_code.guard import KILL, WRITE_STACKS
from flowrl.user_code.launcher import Launcher, environment_of
from flowrl.user_code.process import OUTPUT_PER_CALL, ProcessLimits, ProcessPipes, describe_end

_MAX_MESSAGE_BYTES = 1 << 23
_STACKS_S = 2.0
"""Time for a process to report its end, or to write its stacks after a timeout, before it is killed."""

_UNREAD_S = 0.01
"""Time after the start of a call for which its output stays in the pipe. Most calls end earlier, so it is not read."""

_MAX_START_FAILURES = 3
"""Processes in a row that ended before they were ready, or were killed while they loaded the same code."""

End = Literal["exited", "killed", "timeout", "corrupt", "not_loaded", "closed", "lost"]
"""Kind of the end of a process: by itself, by a signal, or by the supervisor for one of the other reasons."""


class FrameError(ValueError):
    """Raised if the bytes of a process are not a message."""


def encode_frame(payload: bytes) -> bytes:
    """Returns the bytes with which `multiprocessing.connection.Connection` sends a payload of less than 2 GiB."""
    return len(payload).to_bytes(4, "big") + payload


def encode_json(value: Any) -> bytes:  # Any: values of JSON, arrays and scalars
    """Returns the JSON of a value. Raises TypeError or ValueError if it has none."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:  # Any: arrays and scalars of NumPy and torch
    """Returns an array or a scalar as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to another process")


class FrameReader:
    """Splits the bytes of a process into messages of JSON. Checks them, because user code can write to the socket."""

    def __init__(self, max_bytes: int = _MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages that are complete. Raises FrameError for anything but a JSON object."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._max_bytes:
                raise FrameError(f"a message has {length} bytes, but at most {self._max_bytes} are allowed")
            if len(self._buffer) < 4 + length:
                return
            payload = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                message = json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise FrameError("a message is not JSON") from error
            if not isinstance(message, dict):
                raise FrameError("a message is not a JSON object")
            yield message


class TimedCall(Protocol):
    """A call in flight."""

    deadline_s: float
    """Time at which it is late."""


CallT = TypeVar("CallT", bound=TimedCall)
StateT = TypeVar("StateT")


class Process(Generic[CallT, StateT]):
    """One process and its calls in flight. Only the supervisor's thread uses it."""

    def __init__(self, number: int, pipes: ProcessPipes, state: StateT) -> None:
        self.number, self.pipes, self.state = number, pipes, state
        self.calls: dict[int, CallT] = {}
        """Calls in flight by number, in the order of their deadlines."""
        self.loaded: set[str] = set()
        """Names of the code that it has loaded."""
        self.loading: str | None = None
        self.load_deadline_s = self.kill_s = self.timer_s = self.output_s = math.inf
        """Times at which the import is late, the process is killed, `Work.on_timer` is called, and output is read."""
        self.is_ready = self.is_retiring = False
        """`is_retiring`: gets no further calls, and ends after those in flight."""
        self.ending: tuple[End, str] | None = None
        """Reason why the supervisor ends the process."""
        self.unsent = bytearray()
        self.reader = FrameReader()

    @property
    def is_usable(self) -> bool:
        """Whether it accepts calls."""
        return self.is_ready and self.ending is None and not self.is_retiring

    @property
    def deadline_s(self) -> float:
        """Time at which the first call in flight, or the import, is late."""
        first = next(iter(self.calls.values()), None)
        return self.load_deadline_s if first is None else min(self.load_deadline_s, first.deadline_s)

    def reclaim_rows(self, num_sent: int) -> int:
        """Reclaims the sent rows that the process has not begun, and returns their number.

        Raises ValueError if there are more than `num_sent`, because the process has added some.
        """
        try:
            num_rows = len(os.read(self.pipes.reclaimed_rows, num_sent + 1))
        except BlockingIOError:
            num_rows = 0
        if num_rows > num_sent:
            raise ValueError("rows that were not sent")
        return num_rows

    def write(self) -> None:
        """Sends as many unsent bytes as possible."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is reported by the guard
            while self.unsent:
                sent = self.pipes.channel.send(memoryview(self.unsent)[: 1 << 18])
                del self.unsent[:sent]

    def read_messages(self) -> Iterator[dict[str, Any]]:  # Any: values of JSON
        """Yields the messages that have arrived. Raises FrameError for invalid bytes, and EOFError at the end."""
        try:
            data = self.pipes.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        yield from self.reader.feed(data)

    def has_data(self) -> bool:
        """Returns whether `read_messages` has bytes, or the end, to read."""
        poller = select.poll()
        poller.register(self.pipes.channel, select.POLLIN)
        return bool(poller.poll(0))


class Work(Protocol[CallT, StateT]):
    """The calls that the processes of a supervisor execute. A class inherits it, and creates its supervisor.

    Leaving the context of the work ends the processes. The methods below `__exit__` run in the supervisor's thread.
    """

    title: str
    """Name for messages, such as `pool of reward functions`."""

    main_loop: str
    """Module whose function `serve` is the main loop of the processes."""

    caller: str | None = None
    """File of the functions that call user code. Messages about a timeout name the line below it. None: no line."""

    supervisor: "Supervisor[CallT, StateT]"

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Protections that the system does not offer (`isolate`). Known after the start of the first process."""
        return self.supervisor.unavailable or ()

    def find_missing_protections(self) -> tuple[str, ...]:
        """Returns the protections that the system does not offer (`isolate`). Starts a process if none has started, and
        blocks until it is ready. Returns an empty tuple if no process can start.
        """
        self.supervisor.wait_for_process()
        return self.unavailable

    def close(self) -> None:
        """Ends all processes and the thread. Calls without a result fail. Can be called again."""
        self.supervisor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make_state(self) -> StateT:
        """Returns the state of a new process."""
        ...

    def accept(self, item: Any) -> None:  # Any: the items of this work
        """Takes an item of `Supervisor.post`."""
        ...

    def dispatch(self) -> None:
        """Loads code and sends calls. Is called after each event."""
        ...

    def on_message(self, process: Process[CallT, StateT], message: Mapping[str, Any]) -> None:  # Any: unchecked JSON
        """Handles a message. Raises LookupError, TypeError or ValueError if it is not valid."""
        ...

    def on_timer(self, process: Process[CallT, StateT]) -> None:
        """Is called once `timer_s` of the process has passed."""

    def on_end(self, process: Process[CallT, StateT], kind: End, text: str) -> None:
        """Takes the calls in flight of an ended process. `text` describes the end."""
        ...

    def describe(self, process: Process[CallT, StateT]) -> str:
        """Returns the code that the process executes or loads, for messages."""
        ...

    def fail_all(self, calls: Sequence[CallT], items: Sequence[Any]) -> None:
        """Fails the calls in flight, the items that `accept` has not received, and those that wait."""
        ...


class Supervisor(Generic[CallT, StateT]):
    """Runs the processes of a `Work`. Its thread starts with the first item. `post` can be called from any thread."""

    def __init__(
        self, work: Work[CallT, StateT], names: Sequence[str], limits: ProcessLimits, settings: Mapping[str, Any]
    ) -> None:
        """`names` are those of the code that processes load. `settings` are further settings of the main loop."""
        self._work, self._names, self._limits = work, names, limits
        self._settings = {
            "memory_mb": limits.memory_mb,
            "allow_network": limits.allow_network,
            "timeout_s": limits.timeout_s,
            **settings,
        }
        self.unavailable: tuple[str, ...] | None = None
        """Protections that the system does not offer (`isolate`). None: no process has started."""

        self._lock = threading.Lock()
        self._inbox: deque[Any] = deque()
        self._probes: list[threading.Event] = []
        """Calls of `wait_for_process`."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._is_awake = False
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._read_inbox())
        # The thread owns everything below.
        self._launcher: Launcher | None = None
        self.processes: dict[int, Process[CallT, StateT]] = {}
        self.numbers = itertools.count(1)
        """Numbers of processes and calls."""
        self.errors: dict[str, tuple[End, str]] = {}
        """Name of code that cannot be loaded -> kind and description of the failure."""
        self._failures: Counter[str | None] = Counter()
        """Name of code -> processes that were killed while they loaded it. None: processes that were never ready."""

    # Any thread.

    def post(self, item: Any, *, starts: bool = True) -> None:  # Any: the items of the work
        """Passes an item to `Work.accept` in the thread. Raises RuntimeError if the supervisor is closed.

        With `starts=False`, ignores the item if the supervisor is closed or its thread has not started.
        """
        with self._lock:
            if not starts and (self._is_closed or self._thread is None):
                return
            if self._is_closed:
                raise RuntimeError(f"the {self._work.title} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._work.title, daemon=True)
                self._thread.start()
            if isinstance(item, threading.Event):
                self._probes.append(item)
            else:
                self._inbox.append(item)
            self._notify()

    def wait_for_process(self) -> None:
        """Starts a process if none has started, and blocks until one is ready, or none can start."""
        done = threading.Event()
        self.post(done)
        done.wait()

    def close(self) -> None:
        """Ends all processes and the thread. Can be called again."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._thread is not None and not was_closed:
                self._notify()
        if self._thread is not None:
            self._thread.join()
        for resource in (self._selector, self._wake, self._woken):
            resource.close()

    def _notify(self) -> None:
        """Ends the wait for events. Requires the lock."""
        if not self._is_awake:
            self._is_awake = True
            self._wake.send(b"w")

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, mask in self._selector.select(self._wait_s()):
                    current = self._key_of(key.fileobj)
                    if current is not None and current.data is key.data:  # not removed by an earlier event
                        key.data(mask)
                self._check_deadlines()
                self._end_probes()
                self._work.dispatch()
        finally:
            self._is_closed = True
            calls = [call for process in self.processes.values() for call in process.calls.values()]
            for process in list(self.processes.values()):
                self._remove(process)
            if self._launcher is not None:
                self._launcher.close()
            with self._lock:
                items = list(self._inbox)
                for done in self._probes:
                    done.set()
            self._work.fail_all(calls, items)

    def _read_inbox(self) -> None:
        with self._lock:
            self._woken.recv(1 << 12)
            self._is_awake = False
            items, self._inbox = self._inbox, deque()
        for item in items:
            self._work.accept(item)

    def _wait_s(self) -> float | None:
        times = [math.inf]
        for process in self.processes.values():
            times.append(process.kill_s)
            if process.ending is None:
                times += (process.deadline_s, process.timer_s, process.output_s if process.calls else math.inf)
        first_s = min(times)
        return None if math.isinf(first_s) else max(0.0, first_s - time.monotonic())

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        for process in list(self.processes.values()):
            if now_s >= process.kill_s:
                process.kill_s = math.inf
                process.pipes.request(KILL)
            elif process.ending is None and now_s >= process.deadline_s:
                process.ending = ("timeout", "")
                process.kill_s = now_s + _STACKS_S
                process.pipes.request(WRITE_STACKS)
            elif process.ending is None and now_s >= process.timer_s:
                process.timer_s = math.inf
                self._work.on_timer(process)
            if process.ending is None and now_s >= process.output_s:
                process.output_s = math.inf
                if process.calls and self._key_of(process.pipes.output) is None:
                    self._watch_output(process)

    def _end_probes(self) -> None:
        """Starts a process that reports the protections that it lacks, and ends the probes after its report."""
        if not self._probes:
            return
        if self.unavailable is None and not self.cannot_start:
            if not self.processes:
                self.start_process()
            return
        with self._lock:
            for done in self._probes:
                done.set()
            self._probes.clear()

    # Processes.

    @property
    def cannot_start(self) -> bool:
        """Whether processes end before they are ready, or load no code."""
        has_failed = self._failures[None] >= _MAX_START_FAILURES
        return has_failed or (bool(self._names) and len(self.errors) == len(self._names))

    def start_process(self) -> Process[CallT, StateT] | None:
        """Starts a process. Returns None if the launcher cannot start one."""
        if self._launcher is None:
            limits = self._limits
            variables = environment_of(os.environ, allow_network=limits.allow_network, also=limits.environment)
            self._launcher = Launcher(variables, self._work.main_loop)
        try:
            pipes = ProcessPipes(self._launcher, self._settings)
        except ConnectionError:  # killed, for example because the memory was exhausted
            self._launcher.close()
            self._launcher = None
            self._count_failure(None, "the launcher of the processes has ended")
            with self._lock:
                self._notify()  # otherwise, no event may follow that starts another process for the waiting calls
            return None
        process = Process[CallT, StateT](next(self.numbers), pipes, self._work.make_state())
        self.processes[process.number] = process
        for source, handler in (
            (process.pipes.channel, lambda mask: self._on_channel(process, mask)),
            (process.pipes.stacks, lambda _: self._on_stacks(process)),
            (process.pipes.guard, lambda _: self._on_guard(process)),
        ):
            self._selector.register(source, selectors.EVENT_READ, handler)
        self._watch_output(process)  # of the import
        return process

    def load(self, process: Process[CallT, StateT], name: str, message: Mapping[str, Any]) -> None:
        """Makes a process load the code `name`. It responds with `loaded` or `not_loaded`."""
        process.loading = name
        if self._limits.load_timeout_s is not None:
            process.load_deadline_s = time.monotonic() + self._limits.load_timeout_s
        self.send(process, encode_json({"kind": "load", "name": name, **message}))

    def send(self, process: Process[CallT, StateT], payload: bytes) -> None:
        """Sends a message. Bytes that the process does not read yet are sent later."""
        process.unsent += encode_frame(payload)
        process.write()
        self._watch_writes(process)

    def call(self, process: Process[CallT, StateT], payload: bytes, num_further_rows: int = 0) -> None:
        """Sends a call. Resets the limit of the output of a call, and discards earlier output.

        The process may also begin `num_further_rows` rows of the message. It ends if it has made that impossible.
        """
        self.allow_output(process)
        process.pipes.printed.clear()
        if num_further_rows:
            try:
                os.write(process.pipes.rows, bytes(num_further_rows))
            except BlockingIOError:
                self.end_corrupt(process, ValueError("rows that were not sent"))
                return
        self.send(process, payload)

    def allow_output(self, process: Process[CallT, StateT]) -> None:
        """Resets the limit of the output of a call."""
        process.pipes.allowance = OUTPUT_PER_CALL
        self._remove_unless(process.pipes.output, False)
        process.output_s = min(process.output_s, time.monotonic() + _UNREAD_S)

    def end(self, process: Process[CallT, StateT], kind: End, text: str = "") -> None:
        """Ends a process, unless it is ending."""
        if process.ending is None:
            process.ending = (kind, text)
            process.pipes.request(KILL)

    def end_corrupt(self, process: Process[CallT, StateT], error: Exception) -> None:
        """Ends a process that has written invalid data."""
        self.end(process, "corrupt", f"wrote invalid data to a descriptor of the {self._work.title} ({error})")

    def _watch_output(self, process: Process[CallT, StateT]) -> None:
        """Reads the output of a process until it has printed as much as it may."""
        self._selector.register(
            process.pipes.output,
            selectors.EVENT_READ,
            lambda _: self._remove_unless(process.pipes.output, process.pipes.read_output()),
        )

    def _watch_writes(self, process: Process[CallT, StateT]) -> None:
        """Waits until the channel of a process can be written to if the process has unsent bytes."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        key = self._key_of(process.pipes.channel)
        if key is not None and key.events != events:
            self._selector.modify(process.pipes.channel, events, key.data)

    def _remove_unless(self, source: Any, is_open: bool) -> None:  # Any: a socket or a descriptor
        """Ignores further events of a source if `is_open` is false."""
        if not is_open and self._key_of(source) is not None:
            self._selector.unregister(source)

    def _key_of(self, source: Any) -> selectors.SelectorKey | None:  # Any: a socket or a descriptor
        """Returns the registration of a source, or None if it is not registered or closed."""
        is_closed = isinstance(source, socket.socket) and source.fileno() < 0
        return None if is_closed else self._selector.get_map().get(source)

    def _remove(self, process: Process[CallT, StateT]) -> None:
        """Ignores further events of a process, and closes its sockets and pipes."""
        for source in (process.pipes.channel, process.pipes.output, process.pipes.stacks, process.pipes.guard):
            self._remove_unless(source, False)
        process.pipes.close()
        del self.processes[process.number]

    # Events of a process.

    def _on_stacks(self, process: Process[CallT, StateT]) -> None:
        self._remove_unless(process.pipes.stacks, process.pipes.read_stacks())
        if process.kill_s < math.inf:
            process.kill_s = min(process.kill_s, time.monotonic() + 0.05)

    def _on_channel(self, process: Process[CallT, StateT], mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            process.write()
            self._watch_writes(process)
        if mask & selectors.EVENT_READ:
            self._read_messages(process)

    def _read_messages(self, process: Process[CallT, StateT]) -> None:
        try:
            for message in process.read_messages():
                if process.ending is None:
                    self._handle(process, message)
        except EOFError:
            self._remove_unless(process.pipes.channel, False)
            if process.ending is None:  # usually its end, which the guard reports next
                process.ending = ("exited", "")
                process.kill_s = time.monotonic() + _STACKS_S
        except (FrameError, LookupError, TypeError, ValueError) as error:
            self._remove_unless(process.pipes.channel, False)
            self.end_corrupt(process, error)

    def _handle(self, process: Process[CallT, StateT], message: Mapping[str, Any]) -> None:
        """Handles a message. Raises LookupError, TypeError or ValueError if it is not valid."""
        kind = message["kind"]
        if kind == "ready" and not process.is_ready:
            process.is_ready, self._failures[None] = True, 0
            self.unavailable = tuple(map(str, message["unavailable"]))
        elif kind in ("loaded", "not_loaded") and process.loading is not None:
            name = process.loading
            if message["name"] != name:
                raise ValueError("unexpected name")
            if kind == "not_loaded":
                self.errors.setdefault(name, ("not_loaded", str(message["message"])))
            else:
                self._work.on_message(process, message)
                process.loaded.add(name)
                self._failures[name] = 0
            process.loading, process.load_deadline_s = None, math.inf
        else:
            self._work.on_message(process, message)

    def _on_guard(self, process: Process[CallT, StateT]) -> None:
        """Handles the end of a process. Results that it has sent before are valid."""
        if process.pipes.read_guard():
            return
        if process.ending is None or process.ending == ("exited", ""):
            process.ending = None
            while process.ending is None and self._key_of(process.pipes.channel) is not None and process.has_data():
                self._read_messages(process)
        output = process.pipes.last_output()
        kind, text = self._describe_end(process)
        self._remove(process)
        if process.loading is not None:
            reason = f"{text} during the import{output}"
            if kind == "killed":  # perhaps by a program outside
                self._count_failure(process.loading, reason)
            else:
                self.errors.setdefault(process.loading, ("timeout" if kind == "timeout" else "not_loaded", reason))
        elif not process.is_ready:
            self._count_failure(None, f"processes of the {self._work.title} cannot start{output}")
        self._work.on_end(process, kind, f"{text}{output}")

    def _describe_end(self, process: Process[CallT, StateT]) -> tuple[End, str]:
        kind, text = process.ending or ("exited", "")
        owner = self._work.describe(process)
        if kind == "exited":
            return describe_end(owner, process.pipes.status())
        if kind == "timeout" and not text:
            limit_s = self._limits.timeout_s if process.loading is None else self._limits.load_timeout_s
            return kind, f"{owner} did not return within {limit_s:g} s{process.pipes.location(self._work.caller)}"
        return kind, f"{owner} {text}"

    def _count_failure(self, name: str | None, reason: str) -> None:
        """Counts a process that has ended before it has loaded its code. Gives the code up after a few of them."""
        self._failures[name] += 1
        if self._failures[name] >= _MAX_START_FAILURES:
            for each in self._names if name is None else [name]:
                self.errors.setdefault(each, ("not_loaded", reason))
