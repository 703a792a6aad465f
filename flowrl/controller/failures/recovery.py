"""What lets a new process take a lost one's place: how its workers were made, and the states they were given last."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.controller.calls.wire import Request
from flowrl.controller.host.host import Construction
from flowrl.controller.placement.plan import Slot
from flowrl.data.batch.block import Ref


@dataclass(frozen=True)
class RecoveryPlan:
    """Goes along with every call to a process that may be replaced. A process that has all of it ignores it."""

    made: tuple[Construction, ...]
    """Its workers, in the order in which they were made."""

    states: tuple[tuple[Request, tuple[Ref, ...]], ...]
    """The last call of each `replay` method, or its last calls where a state comes in several, with the references that
    they read, in the order of submission."""

    since: int = 0
    """Number of the last call of the attempt before this one: what a worker was given until then is no state that
    another undoes."""

    @property
    def requests(self) -> list[Request]:
        """The calls of `states` alone."""
        return [request for request, _ in self.states]


_Key = tuple[str, str, int]
"""Role, method and number of a call that gives a state, or a part of one."""


class Recovery:
    """The driver's record of every process whose workers are all stateless."""

    def __init__(self) -> None:
        self._made: defaultdict[Slot, list[Construction]] = defaultdict(list)
        self._states: defaultdict[Slot, dict[_Key, tuple[Request, tuple[Ref, ...]]]] = defaultdict(dict)
        self._irreplaceable: set[str] = set()
        self._known: dict[Slot, RecoveryPlan] = {}
        self._since = 0

    def constructed(self, slot: Slot, construction: Construction) -> None:
        """A worker is made in a slot, perhaps in the place of one of an earlier attempt."""
        role = construction.role
        self._made[slot] = [*(made for made in self._made[slot] if made.role != role), construction]
        self._states[slot] = {key: state for key, state in self._states[slot].items() if key[0] != role}
        self._known.pop(slot, None)

    def begin_again(self, ended: Sequence[Slot], number: int) -> None:
        """Another attempt begins after so many calls: all states are to be given anew, and of the processes that were
        ended, others are started with nothing in them."""
        self._since = number
        self._states.clear()
        self._known.clear()
        for slot in ended:
            self._made.pop(slot, None)
            self._irreplaceable.discard(slot.pool)

    def first_role(self, slot: Slot) -> tuple[str, int]:
        """Role and rank of the first worker in a slot; the pool's where it has none yet."""
        for made in self._made[slot][:1]:
            return made.role, made.rank
        return slot.pool, slot.rank

    def called(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> None:
        """A method is called; if it gives its worker a state, the references stay alive until the next state begins."""
        numbered_by = request.contract.replay
        if not numbered_by:
            return
        number = request.arguments.get(numbered_by, 0) if isinstance(numbered_by, str) else 0
        states, method = self._states[slot], (request.role, request.method)
        if number == 0:
            for key in [key for key in states if key[:2] == method]:
                del states[key]
        states[*method, number] = (request, tuple(refs))
        self._known.pop(slot, None)

    def rule_out(self, pools: Sequence[str]) -> None:
        """The processes of these pools hold what nothing brings back."""
        self._irreplaceable.update(pools)

    def brings_back(self, pool: str) -> bool:
        """Whether a lost process of a pool is replaced."""
        return pool not in self._irreplaceable

    def of(self, slot: Slot) -> RecoveryPlan | None:
        """What brings a slot's process back; None if nothing does."""
        if not self.brings_back(slot.pool):
            return None
        if slot not in self._known:
            self._known[slot] = RecoveryPlan(tuple(self._made[slot]), tuple(self._states[slot].values()), self._since)
        return self._known[slot]
