"""The protocol between the driver's controller and whatever runs its hosts: Ray, or this process."""

from collections.abc import Sequence
from typing import Any, Protocol

from flowrl.config.base import Device
from flowrl.controller.host import Construction
from flowrl.controller.plan import Inventory, PoolPlan, Slot
from flowrl.controller.wire import Request
from flowrl.data.block import Ref
from flowrl.data.payload import Payload


class Backend(Protocol):
    """Runs hosts. `Ref`s that it returns raise `WorkerError` on `get` when what should fill them failed."""

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """The devices that its hosts may have; `devices` states a count per node instead."""
        ...

    def start_pools(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Starts a host per slot of each. Raises `PlacementError` when the devices are not to be had."""
        ...

    def start_tasks(self, pool: PoolPlan) -> None:
        """Starts the host that runs pure functions, which takes no device."""
        ...

    def join(self, pool: PoolPlan, kind: str) -> list[Ref]:
        """Makes the pool's process group, for roles whose ranks talk to each other; the references are `Report`s."""
        ...

    def construct(self, slot: Slot, construction: Construction) -> Ref:
        """Makes a worker in a slot's host; the reference is its `Report`."""
        ...

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> tuple[Ref, Ref]:
        """Runs a method in a slot's host: references to the result and to its `Report`."""
        ...

    def share(self, payload: Payload) -> Ref:
        """Puts rows of the driver where every host can read them."""
        ...

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        """Waits until all of these reports are there (or failed), at most so long; returns those that are."""
        ...

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        """The values of several references at once. Raises as the first that failed."""
        ...

    def end_pool(self, name: str) -> None:
        """Ends the hosts of a pool at once."""
        ...

    def close(self) -> None:
        """Ends everything that this backend started."""
        ...
