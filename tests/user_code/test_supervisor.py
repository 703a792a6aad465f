"""A supervisor runs any work: its calls, their results and deadlines, the ends of processes, and invalid messages."""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from flowrl.user_code.process import ProcessLimits
from flowrl.user_code.supervisor import (
    End,
    FrameError,
    FrameReader,
    Process,
    Supervisor,
    Work,
    encode_frame,
    encode_json,
)
from tests.rewards.test_pool import MARK, mark
from tests.user_code import echo_loop

__all__ = ["mark"]


@dataclass(eq=False)
class Call:
    value: Any
    result: "Future[Any]"
    deadline_s: float = math.inf


class Echo(Work[Call, None]):
    """Sends a call at a time to one process, which returns its value."""

    title, main_loop, caller = "echo", echo_loop.__name__, echo_loop.__file__

    def __init__(self, timeout_s: float | None = None) -> None:
        limits = ProcessLimits(timeout_s=timeout_s, environment=(MARK,))
        self.supervisor = Supervisor(self, ["echo"], limits, {})
        self._timeout_s, self._waiting = timeout_s, list[Call]()

    def submit(self, value: Any) -> "Future[Any]":
        call = Call(value, Future())
        self.supervisor.post(call)
        return call.result

    def make_state(self) -> None:
        return None

    def accept(self, item: Call) -> None:
        self._waiting.append(item)

    def dispatch(self) -> None:
        if not self.supervisor.processes:
            self.supervisor.start_process()
        for process in self.supervisor.processes.values():
            if self._waiting and process.is_usable and not process.calls:
                call = process.calls[next(self.supervisor.numbers)] = self._waiting.pop(0)
                call.deadline_s = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s
                self.supervisor.call(process, encode_json({"value": call.value}))

    def on_message(self, process: Process[Call, None], message: Mapping[str, Any]) -> None:
        (number,) = process.calls
        process.calls.pop(number).result.set_result(message["value"])

    def on_end(self, process: Process[Call, None], kind: End, text: str) -> None:
        for call in process.calls.values():
            call.result.set_result((kind, text))

    def describe(self, process: Process[Call, None]) -> str:
        return "an echo"

    def fail_all(self, calls: Sequence[Call], items: Sequence[Call]) -> None:
        for call in [*calls, *items, *self._waiting]:
            call.result.set_result("closed")


def test_calls_return_their_values(mark: str) -> None:
    with Echo() as echo:
        values = [1.5, "é", [None, {"a": True}], "x" * 300_000]
        assert [echo.submit(value).result(timeout=200) for value in values] == values
        assert echo.find_missing_protections() == echo.unavailable


@pytest.mark.parametrize(
    ("value", "end", "fact"),
    [
        ("exit", "exited", "3"),
        ("kill", "killed", "SIGKILL"),
        ("hang", "timeout", "wait_for_service"),
        ("junk", "corrupt", ""),
    ],
)
def test_the_end_of_a_process_is_described_and_another_one_starts(mark: str, value: str, end: str, fact: str) -> None:
    with Echo(timeout_s=1.0 if value == "hang" else None) as echo:
        kind, text = echo.submit(value).result(timeout=200)
        assert kind == end and text.startswith(("an echo", "the process of an echo")) and fact in text
        assert echo.submit("again").result(timeout=200) == "again"


def test_a_closed_supervisor_fails_its_calls_and_rejects_others(mark: str) -> None:
    echo = Echo()
    futures = [echo.submit("hang") for _ in range(3)]
    echo.close()
    echo.close()
    assert [future.result(timeout=1) for future in futures] == ["closed"] * 3
    with pytest.raises(RuntimeError, match="echo"):
        echo.submit(1)


def test_messages_are_split_at_their_lengths() -> None:
    data = b"".join(encode_frame(encode_json({"number": i})) for i in range(3))
    reader = FrameReader(100)
    assert [message for i in range(len(data)) for message in reader.feed(data[i : i + 1])] == [
        {"number": 0}, {"number": 1}, {"number": 2},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", encode_frame(b"x" * 101), encode_frame(b"[1]"), encode_frame(b"{"), encode_frame(b"")]
)
def test_other_bytes_are_errors(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader(100).feed(data))
