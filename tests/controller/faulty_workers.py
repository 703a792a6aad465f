"""Workers that fail in many ways, once or always. Importable by Ray's processes."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed

from flowrl.config import UserError
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict

PROTO = Dispatch.DP_COMPUTE_PROTO
DEADLINE_S = 2.0
"""Deadline of calls that hang. Calls that finish have a longer one, because machines may be slow."""


def commit(fault: str) -> Any:
    """Fails in the given way."""
    if fault == "raise":
        raise KeyError("nothing there")
    if fault == "reject":
        raise UserError("the input is invalid")
    if fault in ("sys.exit", "os._exit", "interrupt", "SIGBUS"):
        leave(fault)
    if fault == "kill":
        time.sleep(0.2)  # so that results of earlier calls are stored
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "spin":
        while True:
            pass
    if fault == "spin_in_c":
        sum(range(10**14))  # a single bytecode, during which the interpreter does not respond
    return threading.Lock() if fault == "unpicklable" else None


def leave(fault: str) -> None:
    """Ends the process, or tries to."""
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "interrupt":
        raise KeyboardInterrupt
    time.sleep(0.2)  # so that results of earlier calls are stored
    if fault == "SIGBUS":
        os.kill(os.getpid(), signal.SIGBUS)
    os._exit(3)


class Faulty(Worker):
    """Stateful ranks with collectives."""

    collective = True

    def __init__(self, fault: str | None = None, bad_rank: int = 1) -> None:
        self.bad_rank = bad_rank
        if self.rank == bad_rank and fault is not None:
            commit(fault)

    @register(Dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def compute(self, fault: str) -> Any:
        """One rank fails; the other returns."""
        return commit(fault) if self.rank == self.bad_rank else None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def gather(self, fault: str) -> float:
        """One rank fails while the other waits for it in a collective."""
        if self.rank == self.bad_rank:
            commit(fault)
        total = torch.ones(1)
        distributed.all_reduce(total, group=self.context.process_group)
        return float(total)

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def gather_to_one(self, fault: str) -> float:
        """Calls `gather` and returns the result of rank 0."""
        return self.gather(fault)

    @register(Dispatch.ONE_TO_ALL, blocking=False, timeout_s=600)
    def linger(self, seconds: float) -> None:
        """One rank sleeps."""
        time.sleep(seconds if self.rank == self.bad_rank else 0.0)

    @register(PROTO, blocking=False, reads=("x",), writes=("y",))
    def misnamed(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"z" if self.rank == self.bad_rank else "y": table["rows", "x"]})

    @register(PROTO, blocking=False, reads=("x",), writes=("y",), rows=2)
    def short(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"y": table["rows", "x"].repeat(1 if self.rank == self.bad_rank else 2)})


class Scorer(Worker):
    """Stateless: its state comes from the constructor and the last `load`."""

    stateless = True

    def __init__(self, factor: int, fault: str | None = None, once: Path | None = None) -> None:
        self.factor, self.offset = factor, 0
        self._fail(fault, once)

    def _fail(self, fault: str | None, once: Path | None) -> None:
        """Fails always, or only until the file `once` exists."""
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

    @register(PROTO, blocking=False, reads=("x",), writes=("score",))
    def score(self, table: TensorDict, fault: str | None = None, once: Path | None = None) -> TensorDict:
        self._fail(fault, once)
        return make_tensordict({"score": table["rows", "x"] * self.factor + self.offset})

    @register(PROTO, blocking=False, reads=("x",), writes=("score",), timeout_s=DEADLINE_S)
    def score_with_deadline(self, table: TensorDict, fault: str | None = None, once: Path | None = None) -> TensorDict:
        return self.score(table, fault, once)


class StatefulScorer(Scorer):
    """Cannot be replaced."""

    stateless = False

    @classmethod
    def user_functions(cls, factor: int) -> tuple[str, ...]:
        return "rewards.score", f"rewards.times_{factor}"


class Chunked(Scorer):
    """Receives its state in chunks and sums them."""

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk")
    def load_chunk(self, offset: int, chunk: int, fault: str | None = None, once: Path | None = None) -> None:
        self._fail(fault, once)
        self.offset = offset + (self.offset if chunk else 0)


class SlowRestart(Scorer):
    """Adds a line to a file per construction; later constructions sleep `again` seconds, or raise it."""

    def __init__(self, lines: Path, again: float | str) -> None:
        super().__init__(1)
        with lines.open("a") as file:
            file.write("constructed\n")
        if len(lines.read_text().splitlines()) > 1:
            if isinstance(again, str):
                raise ArithmeticError(again)
            time.sleep(again)

    @classmethod
    def user_functions(cls, lines: Path, again: float | str) -> tuple[str, ...]:
        return (f"rewards.score_{again:g}",) if isinstance(again, float) else ()


class Doubling(Worker):
    """Reads the scores of another role."""

    @register(PROTO, blocking=False, reads=("score",), writes=("double",))
    def double(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"double": table["rows", "score"] * 2})


class RaisingWorker(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_on(self, rank: int, others_sleep_s: float = 0.0) -> int:
        """Raises on one rank; the others sleep, like peers in a collective."""
        if self.rank == rank:
            raise KeyError("nothing there")
        time.sleep(others_sleep_s)
        return self.rank

    @register(Dispatch.RANK_ZERO)
    def refuse(self) -> None:
        raise UserError("the folder is empty; give one with a model")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def add_one(self, x: int) -> int:
        return x + 1

    @register(Dispatch.RANK_ZERO, blocking=False)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def unregistered(self) -> None:
        """Has no decorator."""


class RaisingConstructor(Worker):
    def __init__(self, bad_rank: int) -> None:
        if self.rank == bad_rank:
            raise ZeroDivisionError("no weights")

    @register(Dispatch.ONE_TO_ALL)
    def hello(self) -> int:
        return self.rank


def raises(table: Any) -> Any:
    raise ArithmeticError("bad sum")
