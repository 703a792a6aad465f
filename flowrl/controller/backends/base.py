"""Backend: the protocol between the controller and the system that runs its hosts (Ray, or the driver's process)."""

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
    """Runs hosts. The returned `Ref`s raise `WorkerError` on `get` if their call failed."""

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """Returns the available devices. `devices` overrides the detected count per node."""
        ...

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Reserves the devices of pools. Raises `PlacementError` if they are not available."""
        ...

    def start_hosts(self, hosts: HostSet, kind: str, *, restarts: int) -> None:
        """Starts a host per slot of a set, on reserved devices.

        `restarts` is the number of times that a lost process is replaced.
        """
        ...

    def join(self, hosts: HostSet, kind: str) -> list[tuple[Slot, Ref]]:
        """Creates the process group of a host set. The returned references resolve to `Report`s."""
        ...

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        """Creates a role's process group in one process of a joined host set. The reference resolves to a `Report`."""
        ...

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        """Constructs a worker once the references in `after` are resolved. The reference resolves to a `Report`."""
        ...

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        """Offloads all workers of a slot's host. The reference resolves to a `Report`.

        `role` and `rank` identify the process in errors. A process that replaces a lost one constructs no workers for it.
        """
        ...

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        """Runs a method in a slot's host and returns references to its result and to its `Report`.

        With a `plan`, a lost process is replaced and the call is sent again, which resolves the same references. If the
        contract has `resend=False`, they raise `ProcessLost` with `is_replaceable` instead.
        """
        ...

    def share(self, payload: Payload) -> Ref:
        """Stores rows of the driver so that all hosts can read them."""
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        """Waits until `count` of these references are resolved or failed, or until the timeout; returns the finished
        references."""
        ...

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        """Returns the values of several references. Raises the error of the first failed reference."""
        ...

    def probe(self, slot: Slot) -> Ref:
        """Returns a reference that resolves when the process is idle, and raises after the process has ended."""
        ...

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        """Returns the current thread stacks (from `faulthandler`) of the processes that are running."""
        ...

    def restart(self, slot: Slot) -> None:
        """Kills a slot's process. Another process replaces it."""
        ...

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        """Returns the slots on this machine whose processes have ended since the last call."""
        ...

    def lost_nodes(self) -> Mapping[int, str]:
        """Returns the names of lost nodes that were in use, by node number."""
        ...

    def end_pool(self, name: str) -> None:
        """Kills the hosts of a pool. Its devices stay reserved for new hosts."""
        ...

    def close(self) -> None:
        """Ends all processes that this backend started, and releases its devices."""
        ...
