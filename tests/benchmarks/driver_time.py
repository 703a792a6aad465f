"""CPU time of the driver per call and rank, with a backend that responds immediately."""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowrl import Batch, WorkerGroup
from flowrl.config.base import Device
from flowrl.controller.backends.base import Clock
from flowrl.controller.calls.calls import Calls
from flowrl.controller.group import DeviceEviction, DeviceOwnership, GroupTasks
from flowrl.controller.host.process_probe import StackDump
from flowrl.controller.placement.plan import FailureGroup, Inventory, Mesh, PoolPlan, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Report, Request, TableArgument
from flowrl.data.batch.block import Description, LocalRef, Ref
from flowrl.data.batch.payload import Payload
from tests.benchmarks.bench_workers import WIDE, Bench, CollectiveBench
from tests.benchmarks.measure import Figure, alone

RANKS = (4, 16, 64, 256)
ROWS_PER_RANK = 16


class InstantRef:
    """A reference that counts as remote."""

    def __init__(self, value: Any = None) -> None:  # Any: a payload or a report
        self._value = value

    @property
    def carrier(self) -> "InstantRef":
        return self

    def get(self) -> Any:
        return self._value

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]

    def done(self) -> bool:
        return True


class InstantBackend:
    """Hosts that return empty reports immediately, with the rows of the contract."""

    is_remote = False
    clock: Clock = time

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return Inventory((max(RANKS),), "cpu")

    def count_usable_cpus(self, nodes: Collection[int]) -> Mapping[int, int]:
        return dict.fromkeys(nodes, 1)

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None: ...

    def start_hosts(self, group: FailureGroup, kind: str, *, restarts: int) -> None: ...

    def join(self, group: FailureGroup, kind: str) -> list[tuple[Slot, Ref]]:
        return []

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        return InstantRef(Report(0, 0, 0, 0))

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        return InstantRef(Report(0, 0, 0, 0))

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        tables = [a for a in request.arguments.values() if isinstance(a, TableArgument)]
        columns = dict.fromkeys(request.contract.writes or (), "row")
        description = Description(tables[0].num_rows, columns) if tables else None
        return InstantRef({} if not request.returns_batch else None), InstantRef(Report(0, 0, 0, 0, description))

    def share(self, payload: Payload) -> Ref:
        return LocalRef(payload)

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        return list(refs)

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        return [ref.get() for ref in refs]

    def probe(self, slot: Slot) -> Ref:
        return InstantRef()

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        return {}

    def restart(self, slot: Slot, process_id: int | None) -> None: ...

    def describe_end(self, slot: Slot) -> str | None:
        return None

    def restore(self, slot: Slot, plan: RecoveryPlan) -> Ref:
        return InstantRef(Report(0, 0, 0, 0))

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        return []

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        return InstantRef(Report(0, 0, 0, 0))

    def lost_nodes(self) -> Mapping[int, str]:
        return {}

    def end_pool(self, name: str) -> None: ...

    def close(self) -> None: ...


def group_of(num_ranks: int, cls: type[Bench] = Bench) -> WorkerGroup:
    """Returns a group whose calls are not executed."""
    slots = [Slot("p", rank, 0, rank, rank) for rank in range(num_ranks)]
    backend = InstantBackend()
    calls = Calls(backend)
    eviction = DeviceEviction(DeviceOwnership(slots), backend, calls, "cpu")
    group = WorkerGroup("bench", cls, slots, Mesh(1, num_ranks, 1, 1), backend, calls, eviction, "cpu")
    GroupTasks(group)
    return group


def figures(repeats: int) -> list[Figure]:
    """Returns microseconds per call and rank for submitting and for reading the result."""
    results = []
    for num_ranks in RANKS:
        group, collective = group_of(num_ranks), group_of(num_ranks, CollectiveBench)
        rows = num_ranks * ROWS_PER_RANK
        x = Batch.from_columns({"x": np.arange(rows)})
        four = group.make(x)
        wide = x.select("x")
        for name in WIDE:
            wide[name] = group.column(x)
        # A new order each time, so that plans of earlier calls are not reused.
        orders = iter([np.random.default_rng(i).permutation(rows) for i in range(4 * repeats)])

        def shuffled(group: WorkerGroup, wide: Batch = wide, orders: Iterator[np.ndarray] = orders) -> None:
            group.read_wide(wide.reorder(next(orders))).get()

        calls: dict[str, Callable[[], object]] = {
            "no-op": group.nothing,
            "4 columns": lambda group=group, four=four: group.echo(four).done(),
            "8 blocks, shuffled": partial(shuffled, group),
            "8 blocks, shuffled, class with `collective = True`": partial(shuffled, collective),
        }
        for name, call in calls.items():
            what = f"driver's time per rank, {num_ranks} ranks, {name}"
            results.append(alone(what, "us", _per_call_us(call, repeats) / num_ranks, 100))
    return results


def _per_call_us(call: Callable[[], object], repeats: int) -> float:
    """Returns the driver's CPU time per call, which other processes do not affect."""
    times = []
    gc.collect()
    for number in range(repeats + 1):
        start_s = time.process_time()
        call()
        if number:
            times.append((time.process_time() - start_s) * 1e6)
    return statistics.median(times)
