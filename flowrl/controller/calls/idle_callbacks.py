"""What is done while the driver waits: a schedule looks after its calls without a thread of its own."""

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from flowrl.controller.future import Future
from flowrl.data.batch.batch import Batch

if TYPE_CHECKING:
    from flowrl.controller.calls.call_record import CallRecord

Attend = Callable[[], Iterable[Future | Batch]]
"""Does what there is to do, without waiting, and returns what is to wake it: results that are in flight."""


class IdleCallbacks:
    """Functions that are called again and again while the driver waits, by the thread that waits.

    Args: `records_of` finds the calls behind a result.
    """

    def __init__(self, records_of: "Callable[[Future | Batch], Iterable[CallRecord]]") -> None:
        self._records_of = records_of
        self._functions: list[Attend] = []
        self._told: set[CallRecord] = set()
        self._calling = threading.Lock()

    def add(self, attend: Attend) -> Callable[[], None]:
        """Takes up a function; what is returned ends that."""
        self._functions.append(attend)
        return lambda: self._functions.remove(attend)

    def clear(self) -> None:
        """Lets go of all functions."""
        self._functions.clear()

    def call(self) -> "list[CallRecord]":
        """Calls every function, and returns the calls at whose end they are to be called again.

        Among them are those that have ended meanwhile, each of them once. Does nothing while another thread, or a
        function that waits itself, is at it. Raises what a function raises.
        """
        if not self._functions or not self._calling.acquire(blocking=False):
            return []
        try:
            results = [result for attend in tuple(self._functions) for result in attend()]
        finally:
            self._calling.release()
        records = [record for result in results for record in self._records_of(result)]
        ended = {record for record in records if record.settled}
        known, self._told = self._told, ended
        return [record for record in records if record not in known or not record.settled]
