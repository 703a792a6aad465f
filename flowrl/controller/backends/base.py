"""Backend: the protocol of systems that run worker processes (Ray, or the driver's own process)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from flowrl.config.base import Device
from flowrl.controller.host.process_probe import StackDump
from flowrl.controller.placement.plan import FailureGroup, Inventory, PoolPlan, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Request
from flowrl.data.batch.block import Ref
from flowrl.data.batch.payload import Payload

RAY_LOGGER = "flowrl.ray"
"""Name of the logger that receives the messages of Ray's own processes."""


class Clock(Protocol):
    """The time of deadlines and waits. The module `time` is the real clock."""

    def monotonic(self) -> float:
        """Returns the current time in monotonic seconds."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Returns after `seconds` seconds."""
        ...


class Backend(Protocol):
    """Runs one host (process with workers) per slot. Returned `Ref`s raise `WorkerError` on `get` if a call failed."""

    is_remote: bool
    """Whether calls run in other processes, so that they also run while the driver computes."""

    @property
    def clock(self) -> Clock:
        """Returns the clock of `wait`. All timeouts of calls are measured with it."""
        ...

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        """Returns the available devices. `devices` replaces the detected number of devices per node."""
        ...

    def count_usable_cpus(self, nodes: Collection[int]) -> Mapping[int, int]:
        """Returns node index -> number of CPUs that a worker process may use. Call `reserve` first."""
        ...

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Reserves the devices of pools. Raises `PlacementError` if they are not available."""
        ...

    def start_hosts(self, group: FailureGroup, kind: str, *, restarts: int) -> None:
        """Starts a process in every slot of a failure group (processes that fail together).

        A lost process is replaced up to `restarts` times.
        """
        ...

    def join(self, group: FailureGroup, kind: str) -> list[tuple[Slot, Ref]]:
        """Creates the process group of a failure group. Returns one reference to a `Report` per process."""
        ...

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        """Creates a role's process group in one process. Returns a reference to the `Report`."""
        ...

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        """Constructs a worker after the references in `after` are resolved. Returns a reference to the `Report`."""
        ...

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        """Offloads all workers of a host. Returns a reference to the `Report`.

        `role` and `rank` identify the process in error messages. With `replaceable`, the call is retried if the process
        is lost.
        """
        ...

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        """Runs a worker method. Returns references to its result and to its `Report`.

        With a `plan`, the call is retried if the process is lost, and the same references receive the result. With
        `resend=False` in the contract, the references raise `ProcessLost` instead.
        """
        ...

    def share(self, payload: Payload) -> Ref:
        """Stores rows that the driver created. All hosts can read the returned reference."""
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        """Waits for `count` resolved or failed references, or until the timeout. Returns these and no pending ones."""
        ...

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        """Returns the values of references. Raises the error of the first failed reference."""
        ...

    def probe(self, slot: Slot) -> Ref:
        """Returns a reference that resolves when the process is idle. If it has ended, `get` raises `ProcessLost`."""
        ...

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        """Returns the thread stacks (from `faulthandler`) of the running processes."""
        ...

    def restart(self, slot: Slot, process_id: int | None) -> None:
        """Kills the process of a slot and starts a replacement.

        With a `process_id`, does nothing if the process with this id has already been replaced. None kills the current
        process.
        """
        ...

    def restore(self, slot: Slot, plan: RecoveryPlan) -> Ref:
        """Restores the workers of a replacement process before earlier calls are retried in this process. Does not
        block. Returns a reference that resolves after the restoration.

        Required for a process that serves other processes, because retried calls may wait for these other processes.
        """
        ...

    def describe_end(self, slot: Slot) -> str | None:
        """Returns how the last process of a slot ended (exit code or signal); None if it is unknown."""
        ...

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        """Returns the slots whose processes on this machine have ended since the previous check."""
        ...

    def lost_nodes(self) -> Mapping[int, str]:
        """Returns node index -> cause of the loss, for the lost nodes that this run uses."""
        ...

    def end_pool(self, name: str) -> None:
        """Kills the hosts of a pool. The devices stay reserved for new hosts."""
        ...

    def close(self) -> None:
        """Ends all processes that this backend started, and releases all devices."""
        ...
