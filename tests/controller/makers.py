"""Workers whose replicas are called one by one, with calls that are not made again. Importable, for Ray's processes."""

import os
import time

from tensordict import TensorDict

from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.batch.tensordicts import make_tensordict
from tests.controller.faults import DEADLINE_S, commit


class Maker(Worker):
    """Holds the last offset, which a new process is given again, and what it was handed, which is lost with it."""

    replicated = stateless = True

    def __init__(self) -> None:
        self.offset = 0
        self.held: list[int] = []

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True)
    def load(self, offset: int) -> None:
        self.offset = offset

    @register(Dispatch.ONE_TO_ALL)
    def identify(self) -> tuple[int, int, int]:
        """Rank, world size and process."""
        return self.rank, self.world_size, os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("y",))
    def shifted(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"y": table["rows", "x"] + self.offset})

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def hand(self, item: int) -> list[int]:
        """What it holds now."""
        self.held.append(item)
        return self.held

    @register(Dispatch.RANK_ZERO, blocking=False, resend=False, timeout_s=DEADLINE_S)
    def commit(self, fault: str) -> None:
        commit(fault)

    @register(Dispatch.RANK_ZERO, blocking=False, resend=False)
    def nap(self, seconds: float) -> int:
        """Its offset, after a while."""
        time.sleep(seconds)
        return self.offset

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("score",), resend=False)
    def score(self, table: TensorDict, fault: str) -> TensorDict:
        commit(fault)
        return make_tensordict({"score": table["rows", "x"] + self.offset})


class Keeper(Maker):
    """Holds what nothing brings back."""

    stateless = False
