"""Workers that fail in every way, once or always. Importable, so that Ray's processes find them."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed

from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.batch.tensordicts import make_tensordict

PROTO = Dispatch.DP_COMPUTE_PROTO
DEADLINE_S = 2.0


def commit(fault: str) -> Any:
    """Does what goes wrong, in the process that calls it."""
    if fault == "raise":
        raise KeyError("nothing there")
    if fault == "kill":
        time.sleep(0.2)  # or the answers to the calls before this one would be lost with the process
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "spin":
        while True:
            pass
    if fault == "spin_in_c":
        sum(range(10**14))  # one bytecode, which keeps the interpreter from everything else
    return threading.Lock() if fault == "unpicklable" else None


class Faulty(Worker):
    """Two ranks that hold something which nothing brings back, and sum over each other."""

    collective = True

    def __init__(self, fault: str | None = None, bad_rank: int = 1) -> None:
        self.bad_rank = bad_rank
        if self.rank == bad_rank and fault is not None:
            commit(fault)

    @register(Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=DEADLINE_S)
    def compute(self, fault: str) -> Any:
        """One rank fails while it computes; the other has returned."""
        return commit(fault) if self.rank == self.bad_rank else None

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=DEADLINE_S)
    def gather(self, fault: str) -> float:
        """One rank fails while the other waits for it in a collective."""
        if self.rank == self.bad_rank:
            commit(fault)
        total = torch.ones(1)
        distributed.all_reduce(total, group=self.context.process_group)
        return float(total)

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=600)
    def linger(self, seconds: float) -> None:
        """One rank takes its time."""
        time.sleep(seconds if self.rank == self.bad_rank else 0.0)

    @register(PROTO, blocking=False, reads=("x",), writes=("y",))
    def misnamed(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"z" if self.rank == self.bad_rank else "y": table["rows", "x"]})

    @register(PROTO, blocking=False, reads=("x",), writes=("y",), rows=2)
    def short(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"y": table["rows", "x"].repeat(1 if self.rank == self.bad_rank else 2)})


class Judge(Worker):
    """Holds what its constructor and its last `load` say, and nothing else."""

    stateless = True

    def __init__(self, factor: int, fault: str | None = None, once: Path | None = None) -> None:
        self.factor, self.offset = factor, 0
        self._fail(fault, once)

    def _fail(self, fault: str | None, once: Path | None) -> None:
        """Fails always, or only while the file `once` is not there."""
        if fault is not None and (once is None or not once.exists()):
            if once is not None:
                once.touch()
            commit(fault)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True)
    def load(self, offset: int) -> None:
        self.offset = offset

    @register(Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(PROTO, blocking=False, reads=("x",), writes=("score",), timeout_s=DEADLINE_S)
    def score(self, table: TensorDict, fault: str | None = None, once: Path | None = None) -> TensorDict:
        self._fail(fault, once)
        return make_tensordict({"score": table["rows", "x"] * self.factor + self.offset})


class Summing(Judge):
    """Takes its state in parts, and adds them up."""

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="part")
    def load_part(self, offset: int, part: int, fault: str | None = None, once: Path | None = None) -> None:
        self._fail(fault, once)
        self.offset = offset + (self.offset if part else 0)


class Recovering(Judge):
    """Leaves a line in a file each time it is made; from the second time on it takes long, or raises."""

    def __init__(self, lines: Path, again: float | str) -> None:
        super().__init__(1)
        with lines.open("a") as file:
            file.write("made\n")
        if len(lines.read_text().splitlines()) > 1:
            if isinstance(again, str):
                raise ArithmeticError(again)
            time.sleep(again)


class Doubling(Worker):
    """Reads what another role made."""

    @register(PROTO, blocking=False, reads=("score",), writes=("double",))
    def double(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"double": table["rows", "score"] * 2})
