"""ResourcePool: devices over nodes, written as a count per node."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.controller.placement.plan import PlacementError, PoolPlan


@dataclass(frozen=True)
class ResourcePool:
    """Devices of a pool on each of its nodes; `ResourcePool((8, 8))` is two nodes with eight devices each.

    `Placement(pools={"main": pool.devices_per_node}, ...)` makes one a pool of a placement.
    """

    devices_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.devices_per_node or min(self.devices_per_node) < 1:
            raise PlacementError(
                f"a resource pool has at least one device on each of its nodes, not {list(self.devices_per_node)}"
            )

    @staticmethod
    def of(pool: PoolPlan) -> "ResourcePool":
        """The pool of a plan."""
        nodes = sorted({slot.node for slot in pool.slots})
        return ResourcePool(tuple(sum(slot.node == node for slot in pool.slots) for node in nodes))

    @property
    def world_size(self) -> int:
        """The number of devices, which is the number of ranks of a group on this pool."""
        return sum(self.devices_per_node)

    def split(self, parts: int) -> list["ResourcePool"]:
        """Equal pools with the same share of every node. Raises `PlacementError` where a node does not divide."""
        odd = [count for count in self.devices_per_node if count % parts]
        if odd:
            raise PlacementError(
                f"a node of {odd[0]} devices does not split into {parts} equal pools; choose a divisor of {odd[0]}"
            )
        return [ResourcePool(tuple(count // parts for count in self.devices_per_node)) for _ in range(parts)]

    @staticmethod
    def merge(pools: Sequence["ResourcePool"]) -> "ResourcePool":
        """One pool with the devices of several that span the same nodes."""
        if len({len(pool.devices_per_node) for pool in pools}) != 1:
            raise PlacementError("pools of different numbers of nodes do not merge; give each an entry per node")
        return ResourcePool(tuple(map(sum, zip(*(pool.devices_per_node for pool in pools), strict=True))))
