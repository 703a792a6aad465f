"""Planning: assigns a device to every rank of every role."""

import difflib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby

from flowrl.config import ONE_DEVICE, ROLES, Placement, ReplicaSizes, RolePlacement, UserError
from flowrl.config.base import DeviceKind


class PlacementError(UserError):
    """A placement is inconsistent or does not fit the devices."""


@dataclass(frozen=True)
class Inventory:
    nodes: tuple[int, ...]
    """Number of devices on each node: GPUs, or CPU slots (one process each)."""

    kind: DeviceKind

    bounded: bool = True
    """Whether `nodes` is a limit. False for detected CPU cores: a pool may have more slots than cores."""


@dataclass(frozen=True)
class Slot:
    """A process of a run: rank `rank` of pool `pool`."""

    pool: str
    rank: int
    node: int
    local_rank: int
    """Rank within the slots of the pool on this node."""
    device: int
    """Index of the device on its node, unique across pools."""
    device_pool: str | None = None
    """Pool that contains the device, if a dedicated process of a role uses it."""
    num_devices: float = 1
    """Number of devices: below 1 if processes share a device, above 1 for a replica of several devices."""
    other_devices: tuple[int, ...] = ()
    """Indices of the devices on this node that the process uses in addition to `device`."""
    followers: "tuple[Slot, ...]" = ()
    """For a replica on several nodes: the slots of its processes on the other nodes."""

    @property
    def node_devices(self) -> tuple[tuple[int, int], ...]:
        """(node, device index) of all devices that the process and its followers use."""
        own = tuple((self.node, device) for device in (self.device, *self.other_devices))
        return own + tuple(location for follower in self.followers for location in follower.node_devices)

    @property
    def owner(self) -> str:
        return self.device_pool or self.pool


@dataclass(frozen=True)
class PoolPlan:
    name: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Coordinates:
    pp: int
    dp: int
    sp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the parallel dimensions of a role: pipeline, data, sequence, tensor. tp varies fastest with the rank."""

    pp: int
    dp: int
    sp: int
    tp: int
    node_dp: int | None = None
    """Number of data-parallel ranks on each of several nodes. None if it is 1, or differs between nodes."""

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    def shard_ranks(self, requested: int | None) -> int:
        """Returns the number of data-parallel ranks over which one copy of a model is sharded.

        If `requested` is None, these are the ranks of a node, because the network between nodes is slower.
        """
        return requested or self.node_dp or self.dp

    def coordinates(self, rank: int) -> Coordinates:
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, sp, tp)

    def rank(self, at: Coordinates) -> int:
        return ((at.pp * self.dp + at.dp) * self.sp + at.sp) * self.tp + at.tp


@dataclass(frozen=True)
class RolePlan:
    """The slots of a role in rank order, and the sizes of its parallel dimensions."""

    role: str
    pool: str
    """Pool expression in the placement: a pool, a range of ranks (`a[0:2]`), or several pools (`a+b`)."""
    slots: Sequence[Slot]
    mesh: Mesh
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the devices that each dedicated process uses."""

    def local_rank(self, rank: int) -> int:
        """Returns the position of a rank within the ranks of the role on the same node."""
        return sum(slot.node == self.slots[rank].node for slot in self.slots[:rank])


@dataclass(frozen=True)
class FailureGroup:
    """A set of processes that fail together. All pools of a role belong to the same failure group."""

    name: str
    pools: tuple[PoolPlan, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All processes of the pools. The index of a process is its rank in the process group of the failure group."""
        return tuple(slot for pool in self.pools for slot in pool.slots)


@dataclass(frozen=True)
class Plan:
    """The processes of a run, and the roles of each process."""

    kind: DeviceKind
    pools: Mapping[str, PoolPlan]
    roles: Mapping[str, RolePlan]
    num_devices: int | None = None
    """Number of available devices; None if the number is not a limit."""
    dedicated: Mapping[str, PoolPlan] = field(default_factory=dict)
    """Role -> its dedicated processes, for roles that do not share processes."""

    def slots(self, role: str) -> Sequence[Slot]:
        return self.roles[role].slots

    def count_processes(self) -> dict[int, int]:
        """Returns node index -> number of processes of all roles."""
        return dict(Counter(slot.node for group in self.failure_groups() for slot in group.slots))

    def failure_groups(self) -> list[FailureGroup]:
        """Returns the failure groups: sets of pools whose processes fail together.

        All pools of a role belong to the same failure group.
        """
        used = {slot for role in self.roles.values() for slot in role.slots}
        all_slots = {pool.name: pool.slots for pool in (*self.pools.values(), *self.dedicated.values())}
        running = {name: tuple(slot for slot in slots if slot in used) for name, slots in all_slots.items()}
        pools = {name: PoolPlan(name, slots) for name, slots in running.items() if slots}
        sets = [{name} for name in pools]
        for role in self.roles.values():
            spanned = {slot.pool for slot in role.slots}
            overlapping = [names for names in sets if names & spanned]
            sets = [names for names in sets if not names & spanned] + [set().union(*overlapping)]
        ordered = [[name for name in pools if name in names] for names in sets]
        return [FailureGroup("+".join(names), tuple(pools[name] for name in names)) for names in ordered]


def plan(
    placement: Placement, inventory: Inventory, roles: Sequence[str] | None = None, dedicated: Collection[str] = ()
) -> Plan:
    """Assigns a device to every rank of every role.

    Args:
        placement: pools and roles.
        inventory: available devices.
        roles: roles of the recipe; None means all roles of the placement. Other standard roles get no devices.
        dedicated: roles with separate processes, one per replica. Each process uses all devices of its replica.
    Raises:
        PlacementError: the placement is inconsistent or does not fit the inventory.
    """
    selected = _selected_roles(placement, roles)
    pools = _used_pools(placement, selected)
    counts = {name: _counts(name, placement.pools[name], inventory) for name in pools}
    slots = _split_shared_devices(_pack(counts, inventory), selected, dedicated)
    pool_plans = {name: PoolPlan(name, slots[name]) for name in pools}
    role_plans, dedicated_plans = {}, {}
    for role, role_placement in selected.items():
        chosen = _role_slots(role, role_placement, slots)
        mesh = _mesh(role, role_placement, chosen)
        role_plans[role] = RolePlan(role, role_placement.pool, chosen, mesh)
        if role in dedicated:
            role_plans[role] = _dedicate_processes(role_plans[role], inventory.kind)
            dedicated_plans[role] = PoolPlan(role_plans[role].slots[0].pool, tuple(role_plans[role].slots))
    num_devices = sum(inventory.nodes) if inventory.bounded else None
    return Plan(inventory.kind, pool_plans, role_plans, num_devices, dedicated_plans)


def _split_shared_devices(
    slots: Mapping[str, tuple[Slot, ...]], selected: Mapping[str, RolePlacement], dedicated: Collection[str]
) -> dict[str, tuple[Slot, ...]]:
    """Sets `num_devices` of each slot on a shared device to 1 / number of processes on the device."""
    users: Counter[Slot] = Counter()
    pool_slots = set()
    for role, role_placement in selected.items():
        chosen = _role_slots(role, role_placement, slots)
        if role in dedicated:
            users.update(chosen)
        else:
            pool_slots |= set(chosen)
    users.update(pool_slots)
    return {
        name: tuple(replace(slot, num_devices=1 / users[slot]) if users[slot] > 1 else slot for slot in pool)
        for name, pool in slots.items()
    }


def _dedicate_processes(planned: RolePlan, kind: str) -> RolePlan:
    """Returns a plan in which the role has dedicated processes (processes without other roles), one per replica.

    In `planned`, the role runs in the processes of its pool. In the result, each dedicated process uses all devices of
    its replica. On each further node of the replica, a follower uses the devices of that node.
    """
    role, mesh = planned.role, planned.mesh
    sizes, slots = ReplicaSizes(mesh.tp, mesh.pp), list[Slot]()
    for start in range(0, mesh.size, sizes.num_devices):
        replica = planned.slots[start : start + sizes.num_devices]
        shares = [slot.num_devices for slot in replica]
        by_node = [tuple(own) for _, own in groupby(replica, key=lambda slot: slot.node)]
        if len(by_node) > 1:
            _check_several_nodes(planned, sizes, by_node, kind)
        if kind == "cuda" and min(shares) < max(shares) == 1:
            raise PlacementError(
                f"placement.roles.{role} has {sizes}, but other roles use only some devices of a replica: place "
                f"other roles on all devices of the replica or on none, or remove tp and pp"
            )
        # Ray assigns fractions of one GPU only. `RayBackend` finds the other shared GPUs of a replica.
        is_shared = kind == "cuda" and max(shares) < 1
        leader, *followers = (
            Slot(
                pool=f"{planned.pool}/{role}",
                rank=len(slots),
                node=own[0].node,
                local_rank=sum(slot.node == own[0].node for slot in slots),
                device=own[0].device,
                device_pool=own[0].pool,
                num_devices=min(shares) if is_shared else sum(slot.num_devices for slot in own),
                other_devices=tuple(slot.device for slot in own[1:]),
            )
            for own in by_node
        )
        slots.append(replace(leader, followers=tuple(followers)))
    return replace(planned, slots=tuple(slots), mesh=replace(mesh, tp=1, pp=1), replica=sizes)


def _check_several_nodes(planned: RolePlan, sizes: ReplicaSizes, by_node: Sequence[Sequence[Slot]], kind: str) -> None:
    """Raises PlacementError if a replica on several nodes has devices that vLLM cannot use together, or shares them."""
    setting, counts = f"placement.roles.{planned.role} has {sizes}", [len(own) for own in by_node]
    if len(set(counts)) > 1 or len({own[0].node for own in by_node}) < len(by_node):
        raise PlacementError(
            f"{setting}, which puts a replica on nodes with {', '.join(map(str, counts))} of its devices, but each "
            f"node of a replica needs the same number: change tp, pp, or pool {planned.pool}"
        )
    if kind == "cpu" and counts[0] > 1:
        raise PlacementError(
            f"{setting}, which puts {counts[0]} devices of a replica on each of {len(by_node)} nodes, but on CPUs vLLM "
            f"supports one per node: set pp: {len(by_node)} and a pool with 1 device per node"
        )
    if any(slot.num_devices < 1 for own in by_node for slot in own):
        raise PlacementError(
            f"{setting}, which puts a replica on {len(by_node)} nodes, but other roles use its devices: place "
            f"{planned.role} on a pool of its own, or make tp and pp smaller"
        )


def _selected_roles(placement: Placement, roles: Sequence[str] | None) -> dict[str, RolePlacement]:
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


def _used_pools(placement: Placement, selected: Mapping[str, RolePlacement]) -> list[str]:
    role_placements = {role: placement.role(role) for role in placement.roles}
    for role, role_placement in role_placements.items():
        for part in role_placement.parts:
            if part.pool not in placement.pools:
                near = _nearest(part.pool, placement.pools)
                raise PlacementError(
                    f"placement.roles.{role} is {role_placement.pool}, but {part.pool} is not a pool; {near}"
                )
    named = {part.pool for role_placement in role_placements.values() for part in role_placement.parts}
    for name in placement.pools:
        if name not in named:
            raise PlacementError(f"placement.pools.{name} has no role: remove it, or use it in placement.roles")
    used = {part.pool for role_placement in selected.values() for part in role_placement.parts}
    return [name for name in placement.pools if name in used]


def _role_slots(role: str, role_placement: RolePlacement, slots: Mapping[str, tuple[Slot, ...]]) -> tuple[Slot, ...]:
    chosen = set()
    for part in role_placement.parts:
        pool = slots[part.pool]
        stop = len(pool) if part.stop is None else part.stop
        if not part.start < stop <= len(pool):
            raise PlacementError(
                f"placement.roles.{role} is {role_placement.pool}, but pool {part.pool} has ranks 0 to "
                f"{len(pool) - 1}: use a range within {part.pool}[0:{len(pool)}]"
            )
        ranks = set(pool[part.start : stop])
        if chosen & ranks:
            raise PlacementError(
                f"placement.roles.{role} is {role_placement.pool}, which contains a rank twice: list each rank once"
            )
        chosen |= ranks
    return tuple(slot for pool in slots.values() for slot in pool if slot in chosen)


def _nearest(word: str, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(allowed)}"


def _counts(name: str, pool: Sequence[int] | str, inventory: Inventory) -> list[int]:
    """Returns the number of devices of a pool per node: the configured counts, or the share of each node."""
    if not isinstance(pool, str):
        counts = list(pool)
    else:
        share = Fraction(1) if pool == "all" else Fraction(pool)
        if share > 1:
            raise PlacementError(
                f"placement.pools.{name} is {pool}, which exceeds the node: use all or a smaller share"
            )
        counts = [_share_of_node(name, pool, share, devices, inventory.bounded) for devices in inventory.nodes]
    if not sum(inventory.nodes):
        raise PlacementError(
            f"placement.pools.{name} is {_text(pool)}, but there are no {inventory.kind} devices: "
            "set placement.device: cpu, or plan for another machine with --devices"
        )
    if not sum(counts):
        raise PlacementError(
            f"placement.pools.{name} is {_text(pool)}, which is an empty pool: use at least one device"
        )
    return counts


def _share_of_node(name: str, pool: str, share: Fraction, devices: int, bounded: bool) -> int:
    count = share * devices
    if not bounded:
        return max(1, math.floor(count))
    if count.denominator != 1:
        raise PlacementError(
            f"placement.pools.{name} is {pool}, but {devices} devices of a node cannot be split in "
            f"{share.denominator} equal parts: use counts per node, such as [1]"
        )
    return int(count)


def _pack(counts: Mapping[str, Sequence[int]], inventory: Inventory) -> dict[str, tuple[Slot, ...]]:
    """Allocates each count of each pool on the next node with enough free devices."""
    used = [0] * len(inventory.nodes)
    packed = {}
    for name, per_node in counts.items():
        slots: list[Slot] = []
        node = -1
        for count in per_node:
            node = _first_node_with_free_devices(name, per_node, count, used, node + 1, inventory)
            first = used[node]
            slots += [Slot(name, len(slots) + i, node, i, first + i) for i in range(count)]
            used[node] += count
        packed[name] = tuple(slots)
    return packed


def _first_node_with_free_devices(
    name: str, per_node: Sequence[int], count: int, used: Sequence[int], start: int, inventory: Inventory
) -> int:
    for node in range(start, len(used)):
        if not inventory.bounded or used[node] + count <= inventory.nodes[node]:
            return node
    if len(per_node) > len(used):
        raise PlacementError(
            f"placement.pools.{name} is {_text(per_node)}, with counts for {len(per_node)} nodes, but there are "
            f"{len(used)}: remove counts"
        )
    in_use = f", of which other pools use {_text(used)}" if any(used) else ""
    raise PlacementError(
        f"placement.pools.{name} is {_text(per_node)}, more than the available devices: the nodes have "
        f"{_text(inventory.nodes)} {inventory.kind} devices{in_use}; make the pool smaller"
    )


def _mesh(role: str, role_placement: RolePlacement, slots: Sequence[Slot]) -> Mesh:
    ranks = len(slots)
    size = role_placement.tp * role_placement.sp * role_placement.pp
    if ranks % size:
        parts = [
            f"{name} {value}"
            for name, value in (("tp", role_placement.tp), ("sp", role_placement.sp), ("pp", role_placement.pp))
            if value > 1
        ]
        raise PlacementError(
            f"placement.roles.{role} has {' x '.join(parts)}, which does not divide the number of devices ({ranks}) of "
            f"pool {role_placement.pool}: change the parallel size or the pool"
        )
    mesh = Mesh(pp=role_placement.pp, dp=ranks // size, sp=role_placement.sp, tp=role_placement.tp)
    _check_tp_nodes(role, mesh.tp, [slot.node for slot in slots])
    return replace(mesh, node_dp=_count_node_dp(mesh, [slot.node for slot in slots]))


def _check_tp_nodes(role: str, tp: int, nodes: Sequence[int]) -> None:
    """Raises PlacementError if tensor-parallel peers are on different nodes. `nodes` has the node of each rank."""
    blocks = [len(list(ranks)) for _, ranks in groupby(nodes)]
    if all(count % tp == 0 for count in blocks):
        return
    largest = math.gcd(tp, *blocks)
    raise PlacementError(
        f"placement.roles.{role} has tp {tp}, which puts tensor-parallel ranks on two nodes, whose network is too slow "
        f"for the sums of each layer: {f'set tp: {largest}' if largest > 1 else 'remove tp'}; stages (pp) may be on "
        f"several nodes"
    )


def _count_node_dp(mesh: Mesh, nodes: Sequence[int]) -> int | None:
    """Returns the number of data-parallel ranks on each node. `nodes` has the node of each rank.

    None if there is one node, if each node has one such rank, or if the nodes have different numbers of ranks.
    """
    blocks = [len(list(ranks)) for _, ranks in groupby(nodes)]
    node_dp, rest = divmod(blocks[0], mesh.sp * mesh.tp)
    is_uniform = len(blocks) == len(set(nodes)) and len(set(blocks)) == 1 and not rest and mesh.pp == 1
    return node_dp if is_uniform and 1 < node_dp < mesh.dp else None


def _text(pool: Sequence[int] | str) -> str:
    return pool if isinstance(pool, str) else str(list(pool))
