"""Workers that log offloads, onloads and calls of all processes in order. Importable by Ray's processes."""

import os
import time
from pathlib import Path

from flowrl.controller.worker import Dispatch, Worker, register

PARTS = frozenset({"weights", "cache"})


class Moving(Worker):
    """Asserts that a call finds its weights and cache on the device.

    Args:
        diary: a file to which every process appends.
        can_offload: whether the worker can be offloaded.
    """

    stateless = replicated = True

    def __init__(self, diary: Path, can_offload: bool = True) -> None:
        self.diary, self.offloaded = diary, frozenset()
        self.write("start")

    @classmethod
    def can_offload_device(cls, device: str, diary: Path, can_offload: bool = True) -> bool:
        return can_offload

    def write(self, text: str) -> None:
        with self.diary.open("a") as file:
            file.write(f"{self.context.role} {text}\n")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self.offloaded != PARTS:
            self.offloaded = PARTS
            self.write("offload")

    def onload(self) -> None:
        self.onload_parts(tuple(PARTS))

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        if onloaded := self.offloaded & set(parts):
            self.offloaded -= onloaded
            self.write("onload " + " and ".join(sorted(onloaded, reverse=True)))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def work(self, after: list[int] | None = None, seconds: float = 0.0) -> int:
        assert not self.offloaded, f"{sorted(self.offloaded)} are offloaded"
        time.sleep(seconds)
        self.write("work")
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=("weights",))
    def load(self, version: list[int]) -> None:
        assert "weights" not in self.offloaded, "the weights are offloaded"
        self.write("load")

    @register(Dispatch.ONE_TO_ALL, memory=())
    def look(self) -> list[str]:
        return sorted(self.offloaded)


class Training(Moving):
    """Has state that cannot be restored."""

    stateless = False


class Slow(Moving):
    """Its offload takes half a second."""

    def offload(self, *, keep_weights: bool) -> None:
        time.sleep(0.5)
        super().offload(keep_weights=keep_weights)


class Stuck(Moving):
    """Its offload fails."""

    def offload(self, *, keep_weights: bool) -> None:
        raise MemoryError("not enough host memory")
