"""Recovery: records the constructions and the replay logs from which lost processes are restored."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.controller.calls.wire import Request
from flowrl.controller.host.host import Construction
from flowrl.controller.placement.plan import Slot
from flowrl.data.batch.block import Ref


@dataclass(frozen=True)
class RecoveryPlan:
    """Constructions and replay log of a process. Every call contains the plan; only a replacement process uses it."""

    constructions: tuple[Construction, ...]
    """The workers of the process, in the order of construction."""

    replay_log: tuple[tuple[Request, tuple[Ref, ...]], ...]
    """(request, inputs) of the calls that set the state of the workers, in the order of submission."""

    attempt_start_id: int = 0
    """Id of the last call before the program restarted. Recovery does not undo state that earlier calls have set."""

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.replay_log]


_Key = tuple[str, str, int]
"""(role, method, index) of a call that sets state. The index counts the calls that set one state together."""


class Recovery:
    """Recovery plans of all processes with stateless workers."""

    def __init__(self) -> None:
        self._constructions: defaultdict[Slot, list[Construction]] = defaultdict(list)
        self._replay_logs: defaultdict[Slot, dict[_Key, tuple[Request, tuple[Ref, ...]]]] = defaultdict(dict)
        self._unrecoverable: set[str] = set()
        self._plans: dict[Slot, RecoveryPlan] = {}
        """Cached plans. A new construction or replay log entry removes the plan."""
        self._attempt_start_id = 0

    def record_construction(self, slot: Slot, construction: Construction) -> None:
        """Records the construction of a worker, and removes the records of an earlier worker of the same role."""
        role = construction.role
        self._constructions[slot] = [*(c for c in self._constructions[slot] if c.role != role), construction]
        log = self._replay_logs[slot]
        self._replay_logs[slot] = {key: entry for key, entry in log.items() if key[0] != role}
        self._plans.pop(slot, None)

    def record_call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> None:
        """Adds a call that sets state to the replay log. The log keeps the inputs alive until the next state is set."""
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
        """Clears all replay logs and the constructions of ended processes. `call_id` is the id of the last call."""
        self._attempt_start_id = call_id
        self._replay_logs.clear()
        self._plans.clear()
        for slot in ended:
            self._constructions.pop(slot, None)
            self._unrecoverable.discard(slot.pool)

    def get_first_role(self, slot: Slot) -> tuple[str, int]:
        """Returns role and rank of the first worker in a slot; pool and rank if the slot has no worker."""
        for construction in self._constructions[slot][:1]:
            return construction.role, construction.rank
        return slot.pool, slot.rank

    def mark_unrecoverable(self, pools: Sequence[str]) -> None:
        self._unrecoverable.update(pools)

    def is_recoverable(self, pool: str) -> bool:
        """Returns whether lost processes of a pool are replaced."""
        return pool not in self._unrecoverable

    def get_plan(self, slot: Slot) -> RecoveryPlan | None:
        """Returns the recovery plan of a process; None if the process is not recoverable."""
        if not self.is_recoverable(slot.pool):
            return None
        if slot not in self._plans:
            constructions, log = tuple(self._constructions[slot]), tuple(self._replay_logs[slot].values())
            self._plans[slot] = RecoveryPlan(constructions, log, self._attempt_start_id)
        return self._plans[slot]
