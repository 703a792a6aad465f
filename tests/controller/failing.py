"""Workers that fail. They need no torch, so that their processes start fast."""

import time
from typing import Any

from flowrl.config import UserError
from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker


class Failing(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_on(self, rank: int, others_sleep_s: float = 0.0) -> int:
        """Raises on one rank; the others sleep, as peers that wait in a collective."""
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


class Unmakeable(Worker):
    def __init__(self, bad_rank: int) -> None:
        if self.rank == bad_rank:
            raise ZeroDivisionError("no weights")

    @register(Dispatch.ONE_TO_ALL)
    def hello(self) -> int:
        return self.rank


def raises(table: Any) -> Any:
    raise ArithmeticError("bad sum")
