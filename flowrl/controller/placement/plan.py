"""Which device each rank of each role gets. Pure: it reads a placement and an inventory, and starts nothing."""

import difflib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from flowrl.config import ROLES, Placement, RolePlacement, UserError


class PlacementError(UserError):
    """A placement that its inventory cannot hold, or that contradicts itself. One sentence naming the key."""


@dataclass(frozen=True)
class Inventory:
    """The devices that a run may use."""

    nodes: tuple[int, ...]
    """Devices of each node: GPUs, or CPU slots, which are processes."""

    kind: Literal["cpu", "cuda"]

    bounded: bool = True
    """False for CPU slots counted by cores, which are no limit: shares are rounded, and a count may exceed them."""


@dataclass(frozen=True)
class Slot:
    """One process: rank `rank` of pool `pool`."""

    pool: str
    rank: int
    node: int
    local_rank: int
    """Rank among the pool's slots on this node."""
    device: int
    """Index of the device on its node; unique over all pools."""
    beside: str | None = None
    """The pool whose device it uses, for a role with processes of its own."""
    devices: float = 1
    """Devices that it is given: a part of one where processes share it, several where it leads them."""
    led: tuple[int, ...] = ()
    """The others of those that it leads, on the same node."""

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(node, device) of every device that its memory is on."""
        return tuple((self.node, device) for device in (self.device, *self.led))

    @property
    def owner(self) -> str:
        """The pool that its device belongs to."""
        return self.beside or self.pool


@dataclass(frozen=True)
class PoolPlan:
    """The slots of a pool, in rank order: node by node, device by device."""

    name: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in its role's mesh."""

    pp: int
    dp: int
    sp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of a role's parallel dimensions; rank = ((pp * DP + dp) * SP + sp) * TP + tp."""

    pp: int
    dp: int
    sp: int
    tp: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.sp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of `rank`, which is in [0, size)."""
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, sp, tp)

    def rank(self, at: Coordinates) -> int:
        """The rank at the coordinates `at`."""
        return ((at.pp * self.dp + at.dp) * self.sp + at.sp) * self.tp + at.tp


@dataclass(frozen=True)
class RolePlan:
    """The processes of a role, in the order of its ranks, and its mesh."""

    role: str
    pool: str
    """As the placement writes it: a pool, some of its ranks, or several pools."""
    slots: Sequence[Slot]
    mesh: Mesh
    num_tp_devices: int = 1
    """Devices that each process leads: those of its tensor-parallel peers, which have no process of the role."""

    def local_rank(self, rank: int) -> int:
        """How many ranks of the role before this one are on its node."""
        return sum(slot.node == self.slots[rank].node for slot in self.slots[:rank])


@dataclass(frozen=True)
class HostSet:
    """Pools that some role spans: their processes may wait for each other, and fail together."""

    name: str
    pools: tuple[PoolPlan, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All processes; a process's place here is its rank in what they share."""
        return tuple(slot for pool in self.pools for slot in pool.slots)


@dataclass(frozen=True)
class Plan:
    """Every process of a run and what runs in it."""

    kind: Literal["cpu", "cuda"]
    pools: Mapping[str, PoolPlan]
    roles: Mapping[str, RolePlan]
    num_devices: int | None = None
    """Devices of the inventory, used or not; None for CPU slots that nobody stated."""
    apart: Mapping[str, PoolPlan] = field(default_factory=dict)
    """Role -> its processes, for roles that have their own."""

    def slots(self, role: str) -> Sequence[Slot]:
        """The slots of `role` in rank order."""
        return self.roles[role].slots

    def host_sets(self) -> list[HostSet]:
        """The pools, those together that a role spans, with the processes that some role has."""
        used = {slot for role in self.roles.values() for slot in role.slots}
        everyone = {pool.name: pool.slots for pool in (*self.pools.values(), *self.apart.values())}
        running = {name: tuple(slot for slot in slots if slot in used) for name, slots in everyone.items()}
        pools = {name: PoolPlan(name, slots) for name, slots in running.items() if slots}
        sets = [{name} for name in pools]
        for role in self.roles.values():
            spanned = {slot.pool for slot in role.slots}
            touched = [names for names in sets if names & spanned]
            sets = [names for names in sets if not names & spanned] + [set().union(*touched)]
        ordered = [[name for name in pools if name in names] for names in sets]
        return [HostSet("+".join(names), tuple(pools[name] for name in names)) for names in ordered]


def plan(
    placement: Placement, inventory: Inventory, roles: Sequence[str] | None = None, dedicated: Collection[str] = ()
) -> Plan:
    """Gives every rank of every role in `roles` a device.

    `roles` are those that a recipe drives; None plans all that `placement` maps. A standard role that a recipe does not
    drive is left out, and so is a pool that then has no role. Roles in `dedicated` have processes of their own on their
    devices, one for all tensor-parallel peers. Raises: PlacementError.
    """
    wanted = _wanted_roles(placement, roles)
    pools = _wanted_pools(placement, wanted)
    counts = {name: _counts(name, placement.pools[name], inventory) for name in pools}
    slots = _shared(_pack(counts, inventory), wanted, dedicated)
    pool_plans = {name: PoolPlan(name, slots[name]) for name in pools}
    role_plans, apart_plans = {}, {}
    for role, place in wanted.items():
        chosen = _role_slots(role, place, slots)
        role_plans[role] = RolePlan(role, place.pool, chosen, _mesh(role, place, len(chosen)))
        if role in dedicated:
            role_plans[role] = _own_processes(role_plans[role], inventory.kind)
            apart_plans[role] = PoolPlan(role_plans[role].slots[0].pool, tuple(role_plans[role].slots))
    num_devices = sum(inventory.nodes) if inventory.bounded else None
    return Plan(inventory.kind, pool_plans, role_plans, num_devices, apart_plans)


def _shared(
    slots: Mapping[str, tuple[Slot, ...]], wanted: Mapping[str, RolePlacement], dedicated: Collection[str]
) -> dict[str, tuple[Slot, ...]]:
    """The slots, each with its part of a device that processes of other roles use too."""
    users: Counter[Slot] = Counter()
    hosts = set()
    for role, place in wanted.items():
        chosen = _role_slots(role, place, slots)
        if role in dedicated:
            users.update(chosen)
        else:
            hosts |= set(chosen)
    users.update(hosts)
    return {
        name: tuple(replace(slot, devices=1 / users[slot]) if users[slot] > 1 else slot for slot in pool)
        for name, pool in slots.items()
    }


def _own_processes(planned: RolePlan, kind: str) -> RolePlan:
    """The role with a process per replica instead of those of its pool."""
    role, mesh = planned.role, planned.mesh
    replicas = [planned.slots[first : first + mesh.tp] for first in range(0, mesh.size, mesh.tp)]
    for replica in replicas:
        if len({slot.node for slot in replica}) > 1:
            raise PlacementError(
                f"placement.roles.{role} has tp {mesh.tp}, and devices of one replica are on two nodes, but one "
                f"process leads them: set tp to a divisor of the devices of a node"
            )
        if kind == "cuda" and mesh.tp > 1 and min(slot.devices for slot in replica) < 1:
            raise PlacementError(
                f"placement.roles.{role} has tp {mesh.tp} on devices that other roles use too, which its own processes "
                f"cannot share: give it a pool of its own, or set tp: 1"
            )
    slots: list[Slot] = []
    for replica in replicas:
        first = replica[0]
        slots.append(
            Slot(
                pool=f"{planned.pool}/{role}",
                rank=len(slots),
                node=first.node,
                local_rank=sum(slot.node == first.node for slot in slots),
                device=first.device,
                beside=first.pool,
                devices=sum(slot.devices for slot in replica),
                led=tuple(slot.device for slot in replica[1:]),
            )
        )
    return replace(planned, slots=tuple(slots), mesh=replace(mesh, tp=1), num_tp_devices=mesh.tp)


def _wanted_roles(placement: Placement, roles: Sequence[str] | None) -> dict[str, RolePlacement]:
    if roles is None:
        return {role: placement.role(role) for role in placement.roles}
    for role in placement.roles:
        if role not in roles and role not in ROLES:
            raise PlacementError(f"placement.roles.{role} is not a role of this recipe; {_nearest(role, roles)}")
    for role in roles:
        if role not in placement.roles:
            raise PlacementError(
                f"placement.roles.{role} is required: assign {role} to a pool (available: {', '.join(placement.pools)})"
            )
    return {role: placement.role(role) for role in roles}


def _wanted_pools(placement: Placement, wanted: Mapping[str, RolePlacement]) -> list[str]:
    """The pools of the wanted roles in the placement's order."""
    places = {role: placement.role(role) for role in placement.roles}
    for role, place in places.items():
        for part in place.parts:
            if part.pool not in placement.pools:
                near = _nearest(part.pool, placement.pools)
                what = "which" if part.pool == place.pool else f"but {part.pool}"
                raise PlacementError(f"placement.roles.{role} is {place.pool}, {what} is not a pool; {near}")
    named = {part.pool for place in places.values() for part in place.parts}
    for name in placement.pools:
        if name not in named:
            raise PlacementError(f"placement.pools.{name} is empty of roles: remove it, or name it in placement.roles")
    used = {part.pool for place in wanted.values() for part in place.parts}
    return [name for name in placement.pools if name in used]


def _role_slots(role: str, place: RolePlacement, slots: Mapping[str, tuple[Slot, ...]]) -> tuple[Slot, ...]:
    """The processes of a role: pools in the placement's order, each in the order of its ranks."""
    chosen = set()
    for part in place.parts:
        pool = slots[part.pool]
        stop = len(pool) if part.stop is None else part.stop
        if not part.start < stop <= len(pool):
            raise PlacementError(
                f"placement.roles.{role} is {place.pool}, but pool {part.pool} has ranks 0 to {len(pool) - 1}: "
                f"write {part.pool}[0:{len(pool)}] or less"
            )
        taken = set(pool[part.start : stop])
        if chosen & taken:
            raise PlacementError(f"placement.roles.{role} is {place.pool}, which names a rank twice: name each once")
        chosen |= taken
    return tuple(slot for pool in slots.values() for slot in pool if slot in chosen)


def _nearest(word: str, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(allowed)}"


def _counts(name: str, pool: Sequence[int] | str, inventory: Inventory) -> list[int]:
    """Devices of the pool on each node that it asks for: one entry per inventory node for a share."""
    if not isinstance(pool, str):
        counts = list(pool)
    else:
        share = Fraction(1) if pool == "all" else Fraction(pool)
        if share > 1:
            raise PlacementError(f"placement.pools.{name} is {pool}, more than every node has: write at most all")
        counts = [_share_of_node(name, pool, share, devices, inventory.bounded) for devices in inventory.nodes]
    if not sum(inventory.nodes):
        raise PlacementError(
            f"placement.pools.{name} is {_text(pool)}, and there are no {inventory.kind} devices: "
            "set placement.device: cpu, or state the devices of another machine"
        )
    if not sum(counts):
        raise PlacementError(f"placement.pools.{name} is {_text(pool)}, an empty pool: give it a device")
    return counts


def _share_of_node(name: str, pool: str, share: Fraction, devices: int, bounded: bool) -> int:
    count = share * devices
    if not bounded:
        return max(1, math.floor(count))
    if count.denominator != 1:
        raise PlacementError(
            f"placement.pools.{name} is {pool}, but {devices} devices cannot be split in {_parts(share)}: "
            "write counts per node, like [1]"
        )
    return int(count)


def _parts(share: Fraction) -> str:
    return {2: "halves", 3: "thirds", 4: "quarters"}.get(share.denominator, f"{share.denominator} parts")


def _pack(counts: Mapping[str, Sequence[int]], inventory: Inventory) -> dict[str, tuple[Slot, ...]]:
    """Slots of each pool: every entry of a pool on a node of its own, the next with room. Pools never overlap."""
    used = [0] * len(inventory.nodes)
    packed = {}
    for name, wanted in counts.items():
        slots: list[Slot] = []
        node = -1
        for count in wanted:
            node = _first_with_room(name, wanted, count, used, node + 1, inventory)
            first = used[node]
            slots += [Slot(name, len(slots) + i, node, i, first + i) for i in range(count)]
            used[node] += count
        packed[name] = tuple(slots)
    return packed


def _first_with_room(
    name: str, wanted: Sequence[int], count: int, used: Sequence[int], start: int, inventory: Inventory
) -> int:
    for node in range(start, len(used)):
        if not inventory.bounded or used[node] + count <= inventory.nodes[node]:
            return node
    if len(wanted) > len(used):
        raise PlacementError(
            f"placement.pools.{name} is {_text(wanted)}, a count for each of {len(wanted)} nodes, "
            f"more than there are, {len(used)}"
        )
    taken = f", and other pools take {_text(used)}" if any(used) else ""
    raise PlacementError(
        f"placement.pools.{name} is {_text(wanted)}, more devices than there are: "
        f"nodes have {_text(inventory.nodes)} {inventory.kind} devices{taken}; make the pool smaller"
    )


def _mesh(role: str, place: RolePlacement, ranks: int) -> Mesh:
    size = place.tp * place.sp * place.pp
    if ranks % size:
        parts = [
            f"{name} {value}" for name, value in (("tp", place.tp), ("sp", place.sp), ("pp", place.pp)) if value > 1
        ]
        raise PlacementError(
            f"placement.roles.{role} has {' x '.join(parts)}, which does not divide the {ranks} devices of "
            f"{place.pool}: change the parallel size or the pool"
        )
    return Mesh(pp=place.pp, dp=ranks // size, sp=place.sp, tp=place.tp)


def _text(pool: Sequence[int] | str) -> str:
    return pool if isinstance(pool, str) else str(list(pool))
