"""The protocol between the driver's controller and whatever runs its hosts: Ray, or this process."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowrl.config.base import Device
from flowrl.controller.calls.wire import Request
from flowrl.controller.failures.process_probe import StackDump
from flowrl.controller.failures.recovery import RecoveryPlan
from flowrl.controller.host.host import Construction
from flowrl.controller.placement.plan import HostSet, Inventory, PoolPlan, Slot
from flowrl.data.batch.block import Ref
from flowrl.data.batch.payload import Payload


class Backend(Protocol):
    """Runs hosts. `Ref`s that it returns raise `WorkerError` on `get` when what should fill them failed."""

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """The devices that its hosts may have; `devices` states a count per node instead."""
        ...

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Takes the devices of pools. Raises `PlacementError` when they are not to be had."""
        ...

    def start_hosts(self, hosts: HostSet, kind: str, *, restarts: int) -> None:
        """Starts a host per slot of a set, whose devices are reserved.

        `restarts`: how often another process may take the place of one that is lost.
        """
        ...

    def join(self, hosts: HostSet, kind: str) -> list[tuple[Slot, Ref]]:
        """Makes the process group of a host set; the references are `Report`s."""
        ...

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        """Makes a role's communicator in a process of a set that was joined; the reference is its `Report`."""
        ...

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        """Makes a worker in a slot's host, once other references are filled; the reference is its `Report`."""
        ...

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        """Has the workers of a slot's host leave its devices; the reference is the `Report`, told of the first.

        In a process that has taken a lost one's place there are none yet, and none is made for this.
        """
        ...

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        """Runs a method in a slot's host: references to the result and to its `Report`.

        With a `plan`, a process that is lost is replaced, and the same references are filled by the new one; where
        the contract says `resend=False` they raise `ProcessLost` instead, whose `is_replaceable` is true.
        """
        ...

    def share(self, payload: Payload) -> Ref:
        """Puts rows of the driver where every host can read them."""
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        """Waits until so many of these reports are there (or failed), at most so long; returns those that are, perhaps
        no more than were asked for."""
        ...

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        """The values of several references at once. Raises as the first that failed."""
        ...

    def probe(self, slot: Slot) -> Ref:
        """A reference that is filled when the slot's process next has time, and raises once it has ended."""
        ...

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        """What the threads of these slots' processes are at now, as `faulthandler` tells it; a process that has not
        started, or has ended, is left out."""
        ...

    def restart(self, slot: Slot) -> None:
        """Ends a slot's process at once, for another to take its place."""
        ...

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those on this machine whose processes have ended since the last such question."""
        ...

    def lost_nodes(self) -> Mapping[int, str]:
        """Nodes that were in use and are gone: number -> name."""
        ...

    def end_pool(self, name: str) -> None:
        """Ends the hosts of a pool at once. Its devices stay reserved, for others to be started there."""
        ...

    def close(self) -> None:
        """Ends everything that this backend started."""
        ...
