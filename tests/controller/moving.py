"""Workers that write down when they move, in the order in which all processes do. Importable, for Ray's processes."""

import os
import time
from pathlib import Path

from flowrl.controller.worker import Dispatch, Worker, register

PARTS = frozenset({"weights", "cache"})


class Moving(Worker):
    """Refuses to work with parts that are away, and to move what has moved already.

    Args:
        diary: a file to which every process appends.
        yields: whether it can leave its device.
    """

    stateless = True

    def __init__(self, diary: Path, yields: bool = True) -> None:
        self.diary, self.away = diary, frozenset()
        self.write("starts")

    @classmethod
    def can_offload_device(cls, device: str, diary: Path, yields: bool = True) -> bool:
        return yields

    def write(self, text: str) -> None:
        with self.diary.open("a") as file:
            file.write(f"{self.context.role} {text}\n")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self.away != PARTS:
            self.away = PARTS
            self.write("leaves")

    def onload(self) -> None:
        self.onload_parts(tuple(PARTS))

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        if coming := self.away & set(parts):
            self.away -= coming
            self.write("comes with " + " and ".join(sorted(coming, reverse=True)))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def work(self, after: list[int] | None = None, seconds: float = 0.0) -> int:
        assert not self.away, f"{sorted(self.away)} are away"
        time.sleep(seconds)
        self.write("works")
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=("weights",))
    def load(self, version: list[int]) -> None:
        assert "weights" not in self.away, "the weights are away"
        self.write("loads")

    @register(Dispatch.ONE_TO_ALL, memory=())
    def look(self) -> list[str]:
        return sorted(self.away)


class Training(Moving):
    """Holds what nothing brings back."""

    stateless = False


class Stuck(Moving):
    """Cannot leave."""

    def offload(self, *, keep_weights: bool) -> None:
        raise MemoryError("the host has no room for what leaves the device")
