"""Which device each rank of each role gets. Pure: it reads a placement and an inventory, and starts nothing."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def slots(self, role: str) -> Sequence[Slot]:
        """The slots of `role` in rank order."""
        return self.roles[role].slots

    def host_sets(self) -> list[HostSet]:
        """The pools, those together that a role spans."""
        sets = [{name} for name in self.pools]
        for role in self.roles.values():
            spanned = {slot.pool for slot in role.slots}
            touched = [names for names in sets if names & spanned]
            sets = [names for names in sets if not names & spanned] + [set().union(*touched)]
        ordered = [[name for name in self.pools if name in names] for names in sets]
        return [HostSet("+".join(names), tuple(self.pools[name] for name in names)) for names in ordered]


def plan(placement: Placement, inventory: Inventory, roles: Sequence[str] | None = None) -> Plan:
    """Gives every rank of every role in `roles` a device.

    `roles` are those that a recipe drives; None plans all that `placement` maps. A standard role that a recipe does not
    drive is left out, and so is a pool that then has no role. Raises: PlacementError.
    """
    wanted = _wanted_roles(placement, roles)
    pools = _wanted_pools(placement, wanted)
    counts = {name: _counts(name, placement.pools[name], inventory) for name in pools}
    slots = _pack(counts, inventory)
    pool_plans = {name: PoolPlan(name, slots[name]) for name in pools}
    role_plans = {}
    for role, place in wanted.items():
        chosen = _role_slots(role, place, slots)
        role_plans[role] = RolePlan(role, place.pool, chosen, _mesh(role, place, len(chosen)))
    num_devices = sum(inventory.nodes) if inventory.bounded else None
    return Plan(inventory.kind, pool_plans, role_plans, num_devices)


def _wanted_roles(placement: Placement, roles: Sequence[str] | None) -> dict[str, RolePlacement]:
    if roles is None:
        return {role: placement.role(role) for role in placement.roles}
    for role in placement.roles:
        if role not in roles and role not in ROLES:
            raise PlacementError(f"placement.roles.{role} is not a role of this recipe; {_nearest(role, roles)}")
    for role in roles:
        if role not in placement.roles:
            raise PlacementError(
                f"placement.roles.{role} is missing: give {role} one of the pools {', '.join(placement.pools)}"
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
            f"placement.pools.{name} is {pool}, an odd split of a node's {devices} devices: "
            "write counts per node, like [1]"
        )
    return int(count)


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


def render_plan(plan: Plan) -> str:
    """A table of role x device: which rank of each role runs where."""
    slots = [slot for pool in plan.pools.values() for slot in pool.slots]
    places = sorted({(slot.node, slot.device) for slot in slots})
    rows = [["role", "pool", "mesh", *(f"{node}:{device}" for node, device in places)]]
    for role, role_plan in plan.roles.items():
        ranks = {(slot.node, slot.device): str(rank) for rank, slot in enumerate(plan.slots(role))}
        mesh = role_plan.mesh
        sizes = (("pp", mesh.pp), ("dp", mesh.dp), ("sp", mesh.sp), ("tp", mesh.tp))
        shape = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "dp")
        rows.append([role, role_plan.pool, shape, *(ranks.get(place, ".") for place in places)])
    idle = (plan.num_devices or 0) - len(places)
    used = f"{len(places)} of {plan.num_devices}" if idle > 0 else f"{len(places)}"
    title = f"{used} {plan.kind} devices; columns are node:device, cells are ranks"
    return "\n".join([title, *aligned(rows, 3)])


def aligned(rows: Sequence[Sequence[str]], num_words: int) -> Iterable[str]:
    """The rows of a table as lines. The first columns, so many, stand to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [
            word.ljust(width) if i < num_words else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
