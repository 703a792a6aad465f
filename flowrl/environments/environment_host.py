"""`EnvironmentHost`: runs episodes of environments in separate processes, thousands per process."""

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowrl.environments.reply_values import parse_ids, parse_observation, parse_tools
from flowrl.environments.requests import (
    Close,
    EnvironmentLimits,
    EnvironmentSpec,
    Failure,
    Reply,
    Request,
    Reset,
    Step,
)
from flowrl.rewards.processes.frames import FrameError, encode_frame, encode_json, make_frame
from flowrl.rewards.processes.process import Launcher, ScoringProcess, describe_end, environment_of
from flowrl.rewards.processes.process_events import ProcessEvents

_GRACE_S = 3.0
"""Time beyond the timeout in which a process itself ends a call, before the host ends the process."""

_STACKS_S = 2.0
"""Time for a process to report its end, or to write its stacks, before it is killed."""

_MAX_START_FAILURES = 3
"""Processes in a row that ended before they had imported the class."""

_MAX_LOSSES = 2
"""Number of times that a process may end during a call of an episode. Then the episode gets a process of its own."""

_CHILD_FAILURES = ("raised", "invalid", "output", "memory", "timeout", "lost")
"""Failures that a process reports itself."""


@dataclass(eq=False)
class _Call:
    request: Request
    future: "Future[Reply]"
    start_s: float
    owner: Hashable
    body: bytes = b"null"
    """JSON of the row or the response."""

    number: int = 0
    deadline_s: float = math.inf


@dataclass(frozen=True)
class _Discard:
    """Request of the host itself: discards the episodes of an owner."""

    owner: Hashable


@dataclass(eq=False)
class _Episode:
    number: int
    process: "_Process"
    owner: Hashable
    """Client that has sent the last request of the episode."""

    lost: str = ""
    """Description of the end of its process."""


@dataclass(eq=False)
class _Process:
    own: ScoringProcess
    is_alone: bool = False
    """True: has at most one episode, which may have ended other processes."""

    is_loaded: bool = False
    load_deadline_s: float = math.inf
    is_retiring: bool = False
    """True: gets no further episodes, and ends after its episodes."""

    episodes: set[Hashable] = field(default_factory=set)
    calls: dict[int, _Call] = field(default_factory=dict)
    """Calls in flight by number, in the order of their deadlines."""

    unsent: list[bytes] = field(default_factory=list)
    ending: tuple[Failure, str] | None = None
    """Reason why the host ends the process."""

    culprit: Hashable = None
    """Episode that is known to have caused the end, or None."""

    is_innocent: bool = False
    """True: no call in flight has caused the end."""

    kill_s: float = math.inf


class EnvironmentHost:
    """Runs episodes in processes that start with the first episode.

    A process that hangs or ends is replaced. Its episodes fail with `lost`, and the caller can start them again with
    the same id. An episode that ends several processes fails with the cause. `submit` can be called from any thread.
    Replies are set by the host's thread, so callbacks of futures must be fast.
    """

    def __init__(self, spec: EnvironmentSpec, limits: EnvironmentLimits) -> None:
        if min(limits.workers, limits.threads) < 1:
            raise ValueError(
                f"workers is {limits.workers} and threads is {limits.threads}, but both must be at least 1"
            )
        self._spec, self._limits = spec, limits
        self._load = encode_frame({"name": spec.name, "options": dict(spec.options)})
        self.unavailable: tuple[str, ...] = ()
        """Protections that the system does not offer (`isolate`). Known after the start of the first process."""

        self._lock = threading.Lock()
        self._inbox: deque[_Call | _Discard] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._events = ProcessEvents(self._read_inbox)
        # The thread owns everything below.
        self._launcher: Launcher | None = None
        self._processes: dict[int, _Process] = {}
        self._episodes: dict[Hashable, _Episode] = {}
        self._losses: dict[Hashable, int] = {}
        self._alone: deque[_Call] = deque()
        """Episodes that wait for a process of their own."""

        self._numbers = itertools.count(1)
        self._num_start_failures = 0
        self._error: tuple[Failure, str] | None = None
        """Reason why no process can start."""

        self._probes: list[threading.Event] = []
        """Calls of `find_missing_protections` that wait for a process."""
        self._has_reported = False
        """Whether a process has reported the protections that it lacks."""

    def submit(self, request: Request, owner: Hashable = None) -> "Future[Reply]":
        """Returns the future reply to a request. Does not block.

        An episode may have one request in flight. `Close` and `Reset` are allowed at any time. The episode belongs to
        the owner of its last request (`discard`).
        """
        future: Future[Reply] = Future()
        call = _Call(request, future, time.monotonic(), owner)
        try:
            if isinstance(request, Reset):
                call.body = encode_json(dict(request.row))
            elif isinstance(request, Step):
                call.body = encode_json({**vars(request.response), "token_ids": list(request.response.token_ids)})
        except (TypeError, ValueError, RecursionError) as error:
            future.set_result(Reply(failure="invalid", message=f"environment {self._spec.name}: a column: {error}"))
            return future
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the host of the environments is closed")
            self._inbox.append(call)
            self._notify()
        return future

    def find_missing_protections(self) -> tuple[str, ...]:
        """Returns the protections that the system does not offer (`isolate`). Starts a process if none has started, and
        blocks until it is ready. Returns an empty tuple if no process can start.
        """
        done = threading.Event()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the host of the environments is closed")
            self._probes.append(done)
            self._notify()
        done.wait()
        return self.unavailable

    def _notify(self) -> None:
        """Wakes the thread, and starts it for the first request."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
            self._thread.start()
        self._events.wake()

    def discard(self, owner: Hashable) -> None:
        """Closes the episodes of an owner that sends no further requests. Does not block."""
        with self._lock:
            if not self._is_closed and self._thread is not None:
                self._inbox.append(_Discard(owner))
                self._events.wake()

    def close(self) -> None:
        """Ends all processes and the thread. Requests without a reply fail. Can be called again."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._thread is not None and not was_closed:
                self._events.wake()
        if self._thread is not None:
            self._thread.join()
        self._events.close()

    def __enter__(self) -> "EnvironmentHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._events.handle(self._wait_s())
                self._check_deadlines()
                self._continue_probes()
                self._send_all()
        finally:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        """Ends all processes and fails the remaining requests."""
        calls = [call for process in self._processes.values() for call in process.calls.values()]
        for process in list(self._processes.values()):
            self._events.remove(process.own)
        self._processes.clear()
        if self._launcher is not None:
            self._launcher.close()
        with self._lock:
            calls += [*self._alone, *(call for call in self._inbox if isinstance(call, _Call))]
            self._inbox.clear()
            for done in self._probes:
                done.set()
        for call in calls:
            self._finish(call, Reply(failure="closed", message="the host of the environments was closed"))

    def _continue_probes(self) -> None:
        """Starts a process that reports the protections that it lacks, and ends the probes after its report."""
        if not self._probes:
            return
        if not self._has_reported and self._error is None:
            if not self._processes:
                self._start_process()
            return
        with self._lock:
            for done in self._probes:
                done.set()
            self._probes.clear()

    def _finish(self, call: _Call, reply: Reply) -> None:
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(reply)

    def _fail(self, call: _Call, kind: Failure, message: str, *, is_blameless: bool = False) -> None:
        seconds = time.monotonic() - call.start_s
        self._finish(call, Reply(failure=kind, message=message, is_blameless=is_blameless, seconds=seconds))

    def _wait_s(self) -> float | None:
        first_s = min(map(self._deadline_s, self._processes.values()), default=math.inf)
        return None if math.isinf(first_s) else max(0.0, first_s - time.monotonic())

    def _deadline_s(self, process: _Process) -> float:
        if process.ending is not None:
            return process.kill_s
        first = next(iter(process.calls.values()), None) if process.is_loaded else None
        return min(process.load_deadline_s, process.kill_s, math.inf if first is None else first.deadline_s)

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        for process in list(self._processes.values()):
            if now_s >= process.kill_s:
                process.kill_s = math.inf
                process.own.kill()
            elif process.ending is None and now_s >= self._deadline_s(process):
                process.ending = ("timeout", "")
                process.kill_s = now_s + _STACKS_S
                process.own.request_stacks()

    # Requests.

    def _read_inbox(self) -> None:
        with self._lock:
            self._events.accept_wake()
            calls, self._inbox = self._inbox, deque()
        for call in calls:
            if isinstance(call, _Discard):
                self._discard_all(call.owner)
            elif isinstance(call.request, Reset):
                self._discard(call.request.episode, "the episode was started again")
                self._reset(call)
            elif isinstance(call.request, Step):
                self._step(call)
            else:
                self._close_episode(call)

    def _reset(self, call: _Call) -> None:
        """Gives an episode to a process."""
        key = call.request.episode
        if self._error is not None:
            self._fail(call, *self._error)
        elif self._losses.get(key, 0) >= _MAX_LOSSES:
            self._alone.append(call)
            self._start_alone()
        elif (process := self._choose_process()) is None:
            self._fail(call, "lost", "no process of environments could start")
        else:
            self._place(call, process)

    def _choose_process(self) -> _Process | None:
        """Returns the process with the fewest episodes, after starting another if some are missing."""
        usable = [p for p in self._processes.values() if not (p.is_alone or p.is_retiring or p.ending)]
        if len(usable) < self._limits.workers and all(process.episodes for process in usable):
            started = self._start_process()
            usable += [started] if started is not None else []
        return min(usable, key=lambda process: len(process.episodes), default=None)

    def _start_alone(self) -> None:
        """Starts the next episode that must run alone, if the process for such episodes is free."""
        alone = [process for process in self._processes.values() if process.is_alone]
        if not self._alone or any(process.episodes or process.ending for process in alone):
            return
        process = alone[0] if alone else self._start_process(is_alone=True)
        call = self._alone.popleft()
        if process is None:
            self._fail(call, "lost", "no process of environments could start")
        else:
            self._place(call, process)

    def _place(self, call: _Call, process: _Process) -> None:
        key = call.request.episode
        self._episodes[key] = _Episode(next(self._numbers), process, call.owner)
        process.episodes.add(key)
        self._call(call, self._episodes[key], "reset")

    def _step(self, call: _Call) -> None:
        episode = self._episodes.get(call.request.episode)
        if episode is None or episode.lost:
            text = "the episode has ended" if episode is None else episode.lost
            self._fail(call, "lost", text, is_blameless=episode is not None)
            self._episodes.pop(call.request.episode, None)
        else:
            episode.owner = call.owner
            self._call(call, episode, "step")

    def _close_episode(self, call: _Call) -> None:
        key = call.request.episode
        self._losses.pop(key, None)
        episode = self._episodes.get(key)
        if episode is None or episode.lost:
            self._discard(key, "the episode was closed")
            self._finish(call, Reply())
            return
        self._fail_calls(key, episode.process, "the episode was closed")
        self._call(call, episode, "close")

    def _fail_calls(self, key: Hashable, process: _Process, message: str) -> None:
        """Fails the calls in flight of an episode. Replies to them are ignored."""
        for number in [number for number, other in process.calls.items() if other.request.episode == key]:
            self._fail(process.calls.pop(number), "closed", message)

    def _discard(self, key: Hashable, message: str) -> None:
        """Removes an episode. Its process closes the environment, and the host ignores the reply."""
        for call in [call for call in self._alone if call.request.episode == key]:
            self._alone.remove(call)
            self._fail(call, "closed", message)
        episode = self._episodes.pop(key, None)
        if episode is not None and not episode.lost:
            self._fail_calls(key, episode.process, message)
            self._enqueue(episode.process, next(self._numbers), episode.number, "close", b"null")
            self._end_episode(key, episode.process)

    def _discard_all(self, owner: Hashable) -> None:
        """Removes the episodes of an owner."""
        # First those that wait for a process of their own, which must not start when another one is removed.
        waiting = [call.request.episode for call in self._alone if call.owner == owner]
        for key in [*waiting, *(key for key, episode in self._episodes.items() if episode.owner == owner)]:
            self._losses.pop(key, None)
            self._discard(key, "the connection of the episode has ended")

    def _end_episode(self, key: Hashable, process: _Process) -> None:
        """Removes an episode from its process, which ends if it is retiring or has no further use."""
        process.episodes.discard(key)
        if process.is_retiring and not process.episodes and process.ending is None:
            process.ending, process.is_innocent = ("lost", "retired"), True
            process.own.kill()
        if process.is_alone and not process.episodes:
            self._start_alone()

    def _call(self, call: _Call, episode: _Episode, kind: str) -> None:
        call.number, call.deadline_s = next(self._numbers), self._call_deadline_s()
        episode.process.calls[call.number] = call
        self._enqueue(episode.process, call.number, episode.number, kind, call.body)

    def _call_deadline_s(self) -> float:
        """Returns the time at which a call without a reply shows that its process hangs.

        The process itself limits the call, and before it the wait for an earlier call of the episode, by `timeout_s`.
        """
        timeout_s = self._limits.timeout_s
        return math.inf if timeout_s is None else time.monotonic() + 2 * timeout_s + _GRACE_S

    def _enqueue(self, process: _Process, number: int, episode: int, kind: str, body: bytes) -> None:
        item = b'{"id":%d,"episode":%d,"op":"%b","body":%b}' % (number, episode, kind.encode(), body)
        process.unsent.append(item)

    def _send_all(self) -> None:
        """Sends the requests of this iteration, one frame per process."""
        for process in self._processes.values():
            if process.unsent and process.ending is None:
                frame = make_frame(b'{"kind":"requests","items":[%b]}' % b",".join(process.unsent))
                process.unsent = []
                process.own.start_call()
                self._events.watch_output(process.own)
                process.own.send(frame)
                self._events.watch_writes(process.own)

    # Processes.

    def _start_process(self, *, is_alone: bool = False) -> _Process | None:
        """Starts a process. Returns None if the launcher cannot start one."""
        limits = self._limits
        settings = {
            "memory_mb": limits.memory_mb, "allow_network": limits.allow_network, "timeout_s": limits.timeout_s,
            "on_timeout": limits.on_timeout, "timeout_message": limits.timeout_message,
            "max_timeouts": limits.max_timeouts, "threads": limits.threads,
        }  # fmt: skip
        if self._launcher is None:
            variables = environment_of(os.environ, allow_network=limits.allow_network, also=limits.environment)
            self._launcher = Launcher(variables, "flowrl.environments.server")
        try:
            process = _Process(ScoringProcess(next(self._numbers), self._launcher, settings), is_alone)
        except ConnectionError:  # killed, for example because the memory was exhausted
            self._launcher.close()
            self._launcher = None
            self._count_start_failure("the launcher of the processes has ended")
            with self._lock:
                self._events.wake()  # otherwise, no event may follow that starts another process for the waiting calls
            return None
        self._processes[process.own.number] = process
        self._events.add(
            process.own,
            on_channel=lambda mask: self._on_channel(process),
            on_stacks=lambda _: self._on_stacks(process),
            on_guard=lambda _: self._on_guard(process),
        )
        process.own.send(self._load)
        return process

    def _on_channel(self, process: _Process) -> None:
        process.own.write()
        self._events.watch_writes(process.own)
        try:
            for message in process.own.read_messages():
                if process.ending is None:
                    self._handle(process, message)
        except EOFError:
            self._events.remove_unless(process.own.channel, False)
            if process.ending is None:  # usually its end, which the guard reports next
                process.ending, process.kill_s = ("exited", ""), time.monotonic() + _STACKS_S
        except (FrameError, LookupError, TypeError, ValueError) as error:
            self._events.remove_unless(process.own.channel, False)
            if process.ending is None:
                process.ending = ("corrupt", f"wrote invalid data to the channel of its process ({error})")
                process.own.kill()

    def _on_stacks(self, process: _Process) -> None:
        self._events.remove_unless(process.own.stacks, process.own.read_stacks())
        if process.kill_s < math.inf:
            process.kill_s = min(process.kill_s, time.monotonic() + 0.05)

    def _handle(self, process: _Process, message: Mapping[str, Any]) -> None:  # Any: unchecked values of JSON
        """Handles a message. Raises LookupError, TypeError or ValueError if it is not valid."""
        kind = message["kind"]
        if kind == "replies":
            for item in message["items"]:
                self._handle_reply(process, int(item["id"]), item["body"])
        elif kind == "ready":
            self.unavailable, self._has_reported = tuple(map(str, message["unavailable"])), True
            process.load_deadline_s = time.monotonic() + (self._limits.load_timeout_s or math.inf)
        elif kind == "loaded":
            process.is_loaded, process.load_deadline_s, self._num_start_failures = True, math.inf, 0
            for call in process.calls.values():
                call.deadline_s = self._call_deadline_s()
        elif kind == "not_loaded":
            self._reject("not_loaded", str(message["message"]))
        elif kind == "blocked":
            keys = {self._episodes[key].number: key for key in process.episodes}
            process.culprit = keys.get(message["episode"])
            where = f": it was in {message['location']}"
            process.ending = ("timeout", f"blocked the event loop of its process{where}")
            process.own.kill()
        elif kind == "retire":
            process.is_retiring = True
        elif kind == "exhausted":
            process.ending, process.is_innocent = ("lost", "the threads of the process hang"), True
            process.own.kill()
        else:
            raise ValueError("unexpected message")

    def _handle_reply(self, process: _Process, number: int, body: Mapping[str, Any]) -> None:
        call = process.calls.get(number)
        if call is None:  # of a closed episode
            return
        failure = body.get("failure")
        if failure is None:
            observation, seconds = parse_observation(body), time.monotonic() - call.start_s
            reply = Reply(observation, parse_ids(body), parse_tools(body), seconds=seconds)
            if isinstance(call.request, Close):
                reply = Reply(seconds=seconds)
        elif failure in _CHILD_FAILURES:
            reply = Reply(failure=failure, message=str(body["message"]), seconds=time.monotonic() - call.start_s)
        else:
            raise ValueError("unknown failure")
        del process.calls[number]
        if reply.failure is not None or isinstance(call.request, Close):
            self._episodes.pop(call.request.episode, None)
            self._losses.pop(call.request.episode, None)
            self._end_episode(call.request.episode, process)
        self._finish(call, reply)

    def _reject(self, kind: Failure, message: str) -> None:
        """Fails all episodes, because the class cannot be imported."""
        self._error = (kind, message)
        for process in self._processes.values():
            for call in process.calls.values():
                self._fail(call, kind, message)
            process.calls.clear()
            process.ending = process.ending or ("not_loaded", message)
            process.own.kill()
        while self._alone:
            self._fail(self._alone.popleft(), kind, message)
        self._episodes.clear()

    def _count_start_failure(self, output: str) -> None:
        self._num_start_failures += 1
        if self._num_start_failures >= _MAX_START_FAILURES:
            text = f"processes of the environment {self._spec.name} end before it is imported{output}"
            self._reject("not_loaded", text)

    def _on_guard(self, process: _Process) -> None:
        """Handles the end of a process. Replies that it has sent before are valid."""
        own = process.own
        if own.read_guard():
            return
        if process.ending is None or process.ending == ("exited", ""):
            process.ending = None
            while process.ending is None and self._events.key_of(own.channel) is not None and own.has_data():
                self._on_channel(process)
        output = own.last_output()
        kind, text = self._describe_end(process)
        self._events.remove(own)
        del self._processes[own.number]
        if not process.is_loaded and self._error is None:
            if kind == "timeout":
                self._reject(kind, f"{text} during the import{output}")
            else:
                self._count_start_failure(output)
        self._fail_episodes(process, kind, f"{text}{output}")
        self._start_alone()

    def _describe_end(self, process: _Process) -> tuple[Failure, str]:
        kind, text = process.ending or ("exited", "")
        owner = f"environment {self._spec.name}"
        if kind == "exited":
            return describe_end(owner, process.own.status())
        if kind == "timeout" and not text:
            limit_s = self._limits.timeout_s if process.is_loaded else self._limits.load_timeout_s
            return kind, f"{owner} did not return within {limit_s:g} s"
        return kind, f"{owner} {text}"

    def _fail_episodes(self, process: _Process, kind: Failure, text: str) -> None:
        """Fails the episodes of an ended process: the one that has caused the end with the cause, others as lost."""
        lost = f"the process of the episode has ended: {text}"
        keys = {call.request.episode for call in process.calls.values()}
        culprit = process.culprit
        is_suspect = process.is_loaded and not process.is_innocent and culprit is None
        if is_suspect and len(keys) == 1 and self._losses.get(next(iter(keys)), 0) >= _MAX_LOSSES:
            (culprit,) = keys
        for call in process.calls.values():
            if isinstance(call.request, Close):
                self._finish(call, Reply())
            elif culprit is not None and call.request.episode == culprit:
                self._fail(call, kind, text)
                self._losses.pop(culprit, None)
            else:
                self._fail(call, "lost", lost, is_blameless=process.is_innocent or culprit is not None)
        for key in process.episodes:
            if key in keys:
                self._episodes.pop(key, None)
                if is_suspect and culprit is None:
                    self._losses[key] = self._losses.get(key, 0) + 1
            elif (episode := self._episodes.get(key)) is not None:
                episode.lost = lost
