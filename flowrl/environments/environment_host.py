"""`EnvironmentHost`: runs episodes of environments in separate processes, thousands per process."""

import math
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowrl.environments import server
from flowrl.environments.requests import (
    Close,
    EnvironmentLimits,
    EnvironmentSpec,
    Failure,
    Reply,
    Request,
    Reset,
    Step,
    parse_reply,
)
from flowrl.user_code.supervisor import End, Process, Supervisor, Work, encode_json

_GRACE_S = 3.0
"""Time beyond the timeout in which a process itself ends a call, before the host ends the process."""

_MAX_LOSSES = 2
"""Number of times that a process may end during a call of an episode. Then the episode gets a process of its own."""

_OPERATIONS = {Reset: b"reset", Step: b"step", Close: b"close"}


@dataclass(eq=False)
class _Call:
    request: Request
    future: "Future[Reply]"
    start_s: float
    owner: Hashable
    body: bytes = b"null"
    """JSON of the row or the response."""

    deadline_s: float = math.inf
    """Time at which its process hangs: the process limits the call, and the wait for an earlier call of the episode,
    by the timeout.
    """


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
class _State:
    """State of a process."""

    is_alone: bool = False
    """True: has at most one episode, which may have ended other processes."""

    episodes: set[Hashable] = field(default_factory=set)
    unsent: list[bytes] = field(default_factory=list)
    """Requests that the next message contains."""

    culprit: Hashable = None
    """Episode that is known to have caused the end, or None."""

    is_innocent: bool = False
    """True: no call in flight has caused the end."""


_Process = Process[_Call, _State]


class EnvironmentHost(Work[_Call, _State]):
    """Runs episodes in processes that start with the first episode.

    A process that hangs or ends is replaced. Its episodes fail with `lost`, and the caller can start them again with
    the same id. An episode that ends several processes fails with the cause. `submit` can be called from any thread.
    Replies are set by the host's thread, so callbacks of futures must be fast.
    """

    title, main_loop = "host of the environments", server.__name__

    def __init__(self, spec: EnvironmentSpec, limits: EnvironmentLimits) -> None:
        if min(limits.workers, limits.threads) < 1:
            raise ValueError(
                f"workers is {limits.workers} and threads is {limits.threads}, but both must be at least 1"
            )
        self._spec, self._limits = spec, limits
        names = ("on_timeout", "timeout_message", "max_timeouts", "threads")
        settings = {name: getattr(limits, name) for name in names}
        self.supervisor = Supervisor(self, [spec.name], limits, settings)
        self._episodes: dict[Hashable, _Episode] = {}
        self._losses: dict[Hashable, int] = {}
        self._alone: deque[_Call] = deque()
        """Episodes that wait for a process of their own."""

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
        self.supervisor.post(call)
        return future

    def discard(self, owner: Hashable) -> None:
        """Closes the episodes of an owner that sends no further requests. Does not block."""
        self.supervisor.post(_Discard(owner), starts=False)

    # The work of the supervisor, in its thread.

    def make_state(self) -> _State:
        return _State()

    def accept(self, item: _Call | _Discard) -> None:
        if isinstance(item, _Discard):
            self._discard_all(item.owner)
        elif isinstance(item.request, Reset):
            self._discard(item.request.episode, "the episode was started again")
            self._reset(item)
        elif isinstance(item.request, Step):
            self._step(item)
        else:
            self._close_episode(item)

    def dispatch(self) -> None:
        """Loads the class in new processes, and sends the requests of this iteration, one message per process."""
        name = self._spec.name
        if name in self.supervisor.errors:
            self._reject(*self.supervisor.errors[name])
            return
        for process in list(self.supervisor.processes.values()):
            state = process.state
            if process.is_retiring and not state.episodes and process.ending is None:
                state.is_innocent = True
                self.supervisor.end(process, "lost", "retired")
            elif process.is_ready and process.loading is None and not process.loaded and process.ending is None:
                self.supervisor.load(process, name, {"options": dict(self._spec.options)})
            elif process.loaded and state.unsent and process.ending is None:
                payload = b'{"kind":"requests","items":[%b]}' % b",".join(state.unsent)
                state.unsent = []
                self.supervisor.call(process, payload)

    def on_message(self, process: _Process, message: Mapping[str, Any]) -> None:  # Any: unchecked values of JSON
        kind = message["kind"]
        if kind == "loaded":
            for call in process.calls.values():  # they are sent now
                call.deadline_s = self._call_deadline_s()
        elif kind == "replies":
            for item in message["items"]:
                self._handle_reply(process, int(item["id"]), item["body"])
        elif kind == "blocked":
            keys = {self._episodes[key].number: key for key in process.state.episodes}
            process.state.culprit = keys.get(message["episode"])
            where = f": it was in {message['location']}"
            self.supervisor.end(process, "timeout", f"blocked the event loop of its process{where}")
        elif kind == "retire":
            process.is_retiring = True
        elif kind == "exhausted":
            process.state.is_innocent = True
            self.supervisor.end(process, "lost", "the threads of the process hang")
        else:
            raise ValueError("unexpected message")

    def _handle_reply(self, process: _Process, number: int, body: Mapping[str, Any]) -> None:
        call = process.calls.get(number)
        if call is None:  # of a closed episode
            return
        reply = parse_reply(body, call.request, time.monotonic() - call.start_s)
        del process.calls[number]
        if reply.failure is not None or isinstance(call.request, Close):
            self._episodes.pop(call.request.episode, None)
            self._losses.pop(call.request.episode, None)
            self._end_episode(call.request.episode, process)
        _finish(call, reply)

    def describe(self, process: _Process) -> str:
        return f"environment {self._spec.name}"

    def on_end(self, process: _Process, kind: End, text: str) -> None:
        """Fails the episodes of an ended process: the one that has caused the end with the cause, others as lost."""
        if self._spec.name in self.supervisor.errors:  # `dispatch` fails the calls of other processes
            for call in process.calls.values():
                _fail(call, *self.supervisor.errors[self._spec.name])
        else:
            self._lose_episodes(process, kind, text)
            self._start_alone()

    def _lose_episodes(self, process: _Process, kind: End, text: str) -> None:
        lost = f"the process of the episode has ended: {text}"
        state = process.state
        keys = {call.request.episode for call in process.calls.values()}
        culprit = state.culprit
        is_suspect = bool(process.loaded) and not state.is_innocent and culprit is None
        if is_suspect and len(keys) == 1 and self._losses.get(next(iter(keys)), 0) >= _MAX_LOSSES:
            (culprit,) = keys
        for call in process.calls.values():
            if isinstance(call.request, Close):
                _finish(call, Reply())
            elif culprit is not None and call.request.episode == culprit:
                _fail(call, kind, text)
                self._losses.pop(culprit, None)
            else:
                _fail(call, "lost", lost, is_blameless=state.is_innocent or culprit is not None)
        for key in state.episodes:
            if key in keys:
                self._episodes.pop(key, None)
                if is_suspect and culprit is None:
                    self._losses[key] = self._losses.get(key, 0) + 1
            elif (episode := self._episodes.get(key)) is not None:
                episode.lost = lost

    def fail_all(self, calls: Sequence[_Call], items: Sequence[_Call | _Discard]) -> None:
        for call in [*calls, *self._alone, *(item for item in items if isinstance(item, _Call))]:
            _fail(call, "closed", "the host of the environments was closed")

    # Requests.

    def _reset(self, call: _Call) -> None:
        """Gives an episode to a process."""
        key = call.request.episode
        if self._spec.name in self.supervisor.errors:
            _fail(call, *self.supervisor.errors[self._spec.name])
        elif self._losses.get(key, 0) >= _MAX_LOSSES:
            self._alone.append(call)
            self._start_alone()
        else:
            self._place(call, self._choose_process())

    def _choose_process(self) -> _Process | None:
        """Returns the process with the fewest episodes, after starting another if some are missing."""
        processes = self.supervisor.processes.values()
        usable = [p for p in processes if not (p.state.is_alone or p.is_retiring or p.ending)]
        if len(usable) < self._limits.workers and all(process.state.episodes for process in usable):
            started = self.supervisor.start_process()
            usable += [started] if started is not None else []
        return min(usable, key=lambda process: len(process.state.episodes), default=None)

    def _start_alone(self) -> None:
        """Starts the next episode that must run alone, if the process for such episodes is free."""
        alone = [process for process in self.supervisor.processes.values() if process.state.is_alone]
        if not self._alone or any(process.state.episodes or process.ending for process in alone):
            return
        process = alone[0] if alone else self.supervisor.start_process()
        if process is not None:
            process.state.is_alone = True
        self._place(self._alone.popleft(), process)

    def _place(self, call: _Call, process: _Process | None) -> None:
        if process is None:
            _fail(call, "lost", "no process of environments could start")
            return
        key = call.request.episode
        self._episodes[key] = _Episode(next(self.supervisor.numbers), process, call.owner)
        process.state.episodes.add(key)
        self._call(call, self._episodes[key])

    def _step(self, call: _Call) -> None:
        episode = self._episodes.get(call.request.episode)
        if episode is None or episode.lost:
            text = "the episode has ended" if episode is None else episode.lost
            _fail(call, "lost", text, is_blameless=episode is not None)
            self._episodes.pop(call.request.episode, None)
        else:
            episode.owner = call.owner
            self._call(call, episode)

    def _close_episode(self, call: _Call) -> None:
        key = call.request.episode
        self._losses.pop(key, None)
        episode = self._episodes.get(key)
        if episode is None or episode.lost:
            self._discard(key, "the episode was closed")
            _finish(call, Reply())
            return
        _fail_calls(key, episode.process, "the episode was closed")
        self._call(call, episode)

    def _discard(self, key: Hashable, message: str) -> None:
        """Removes an episode. Its process closes the environment, and the host ignores the reply."""
        for call in [call for call in self._alone if call.request.episode == key]:
            self._alone.remove(call)
            _fail(call, "closed", message)
        episode = self._episodes.pop(key, None)
        if episode is not None and not episode.lost:
            _fail_calls(key, episode.process, message)
            episode.process.state.unsent.append(_encode(next(self.supervisor.numbers), episode.number, b"close"))
            self._end_episode(key, episode.process)

    def _discard_all(self, owner: Hashable) -> None:
        """Removes the episodes of an owner."""
        # First those that wait for a process of their own, which must not start when another one is removed.
        waiting = [call.request.episode for call in self._alone if call.owner == owner]
        for key in [*waiting, *(key for key, episode in self._episodes.items() if episode.owner == owner)]:
            self._losses.pop(key, None)
            self._discard(key, "the connection of the episode has ended")

    def _end_episode(self, key: Hashable, process: _Process) -> None:
        """Removes an episode from its process."""
        process.state.episodes.discard(key)
        if process.state.is_alone and not process.state.episodes:
            self._start_alone()

    def _call(self, call: _Call, episode: _Episode) -> None:
        number, process = next(self.supervisor.numbers), episode.process
        if process.loaded:
            call.deadline_s = self._call_deadline_s()
        process.calls[number] = call
        process.state.unsent.append(_encode(number, episode.number, _OPERATIONS[type(call.request)], call.body))

    def _call_deadline_s(self) -> float:
        timeout_s = self._limits.timeout_s
        return math.inf if timeout_s is None else time.monotonic() + 2 * timeout_s + _GRACE_S

    def _reject(self, kind: Failure, message: str) -> None:
        """Fails all episodes, because the class cannot be imported."""
        for process in list(self.supervisor.processes.values()):
            for call in process.calls.values():
                _fail(call, kind, message)
            process.calls.clear()
            self.supervisor.end(process, "not_loaded", message)
        while self._alone:
            _fail(self._alone.popleft(), kind, message)
        self._episodes.clear()


def _encode(number: int, episode: int, operation: bytes, body: bytes = b"null") -> bytes:
    """Returns the JSON of a request to a process."""
    return b'{"id":%d,"episode":%d,"op":"%b","body":%b}' % (number, episode, operation, body)


def _finish(call: _Call, reply: Reply) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_result(reply)


def _fail(call: _Call, kind: Failure, message: str, *, is_blameless: bool = False) -> None:
    seconds = time.monotonic() - call.start_s
    _finish(call, Reply(failure=kind, message=message, is_blameless=is_blameless, seconds=seconds))


def _fail_calls(key: Hashable, process: _Process, message: str) -> None:
    """Fails the calls in flight of an episode. Replies to them are ignored."""
    for number in [number for number, other in process.calls.items() if other.request.episode == key]:
        _fail(process.calls.pop(number), "closed", message)
