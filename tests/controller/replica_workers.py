"""Replicated workers with `resend=False` methods. Importable by Ray's processes."""

import os
import time

from tensordict import TensorDict

from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict
from tests.controller.faulty_workers import DEADLINE_S, commit


class Replica(Worker):
    """Holds the last offset, which is replayed, and a list of items, which is lost with its process."""

    replicated = stateless = True

    def __init__(self) -> None:
        self.offset = 0
        self.items: list[int] = []

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True)
    def load(self, offset: int) -> None:
        self.offset = offset

    @register(Dispatch.ONE_TO_ALL)
    def identify(self) -> tuple[int, int, int]:
        """Returns rank, world size and process id."""
        return self.rank, self.world_size, os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("y",))
    def shifted(self, table: TensorDict) -> TensorDict:
        return make_tensordict({"y": table["rows", "x"] + self.offset})

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def add_item(self, item: int) -> list[int]:
        """Adds an item and returns all items."""
        self.items.append(item)
        return self.items

    @register(Dispatch.RANK_ZERO, blocking=False, resend=False, timeout_s=DEADLINE_S)
    def commit(self, fault: str) -> None:
        commit(fault)

    @register(Dispatch.RANK_ZERO, blocking=False, resend=False)
    def nap(self, seconds: float) -> int:
        """Sleeps and returns the offset."""
        time.sleep(seconds)
        return self.offset

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("score",), resend=False)
    def score(self, table: TensorDict, fault: str) -> TensorDict:
        commit(fault)
        return make_tensordict({"score": table["rows", "x"] + self.offset})


class StatefulReplica(Replica):
    """Holds state that cannot be restored."""

    stateless = False
