"""Recovery: records how workers were constructed and which calls set their state, to rebuild lost processes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.controller.calls.wire import Request
from flowrl.controller.host.host import Construction
from flowrl.controller.placement.plan import Slot
from flowrl.data.batch.block import Ref


@dataclass(frozen=True)
class RecoveryPlan:
    """The construction and replay log of a process, sent with each call to it; a complete process ignores it."""

    constructions: tuple[Construction, ...]
    """The workers of the process, in the order of construction."""

    replay_log: tuple[tuple[Request, tuple[Ref, ...]], ...]
    """(request, references that it reads) of the calls that set the workers' state, in the order of submission."""

    attempt_start_id: int = 0
    """Id of the last call of the previous attempt at the program. State set by calls up to it cannot be undone."""

    @property
    def requests(self) -> list[Request]:
        """The requests of the replay log."""
        return [request for request, _ in self.replay_log]


_Key = tuple[str, str, int]
"""(role, method, index) of a call that sets state. The index counts the calls that together set one state."""


class Recovery:
    """The recovery plans of all processes whose workers are stateless."""

    def __init__(self) -> None:
        self._constructions: defaultdict[Slot, list[Construction]] = defaultdict(list)
        self._replay_logs: defaultdict[Slot, dict[_Key, tuple[Request, tuple[Ref, ...]]]] = defaultdict(dict)
        self._unrecoverable: set[str] = set()
        self._plans: dict[Slot, RecoveryPlan] = {}
        """Cached plans, dropped when a construction or a replay log changes."""
        self._attempt_start_id = 0

    def record_construction(self, slot: Slot, construction: Construction) -> None:
        """Records a new worker. It replaces the worker of the same role from an earlier attempt."""
        role = construction.role
        self._constructions[slot] = [*(c for c in self._constructions[slot] if c.role != role), construction]
        log = self._replay_logs[slot]
        self._replay_logs[slot] = {key: entry for key, entry in log.items() if key[0] != role}
        self._plans.pop(slot, None)

    def record_call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> None:
        """Adds a call that sets state to the replay log, which keeps its references alive until the next state."""
        index_parameter = request.contract.replay
        if not index_parameter:
            return
        index = request.arguments.get(index_parameter, 0) if isinstance(index_parameter, str) else 0
        log, method = self._replay_logs[slot], (request.role, request.method)
        if index == 0:
            for key in [key for key in log if key[:2] == method]:
                del log[key]
        log[*method, index] = (request, tuple(refs))
        self._plans.pop(slot, None)

    def start_attempt(self, ended: Sequence[Slot], call_id: int) -> None:
        """Clears all replay logs, and the constructions of ended processes, before the program restarts.

        `call_id` is the id of the last call of the previous attempt.
        """
        self._attempt_start_id = call_id
        self._replay_logs.clear()
        self._plans.clear()
        for slot in ended:
            self._constructions.pop(slot, None)
            self._unrecoverable.discard(slot.pool)

    def get_first_role(self, slot: Slot) -> tuple[str, int]:
        """Returns the role and rank of the first worker in a slot, or the pool and rank if it has no worker."""
        for construction in self._constructions[slot][:1]:
            return construction.role, construction.rank
        return slot.pool, slot.rank

    def mark_unrecoverable(self, pools: Sequence[str]) -> None:
        """Marks pools whose processes hold state that cannot be restored."""
        self._unrecoverable.update(pools)

    def is_recoverable(self, pool: str) -> bool:
        """Returns whether lost processes of a pool are replaced."""
        return pool not in self._unrecoverable

    def get_plan(self, slot: Slot) -> RecoveryPlan | None:
        """Returns the recovery plan of a slot's process; None if the process cannot be replaced."""
        if not self.is_recoverable(slot.pool):
            return None
        if slot not in self._plans:
            constructions, log = tuple(self._constructions[slot]), tuple(self._replay_logs[slot].values())
            self._plans[slot] = RecoveryPlan(constructions, log, self._attempt_start_id)
        return self._plans[slot]
