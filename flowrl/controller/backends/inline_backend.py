"""Inline backend: runs all workers synchronously in the driver's process, where `breakpoint()` works."""

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.config.base import Device
from flowrl.config.user_errors import convert_errors
from flowrl.controller.backends.base import Clock
from flowrl.controller.errors import WorkerError, describe_unpicklable
from flowrl.controller.host.host import Host
from flowrl.controller.host.process_probe import StackDump
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import FailureGroup, Inventory, PoolPlan, Slot
from flowrl.controller.wire import Construction, FutureArgument, RecoveryPlan, Request, TableArgument
from flowrl.data.batch.block import LocalRef, Ref
from flowrl.data.batch.payload import Payload


class InlineBackend:
    """Runs the ranks of a call one after another. A failed call raises immediately."""

    is_remote = False
    clock: Clock = time

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, int], Host] = {}

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return local_inventory(device, devices)

    def count_usable_cpus(self, nodes: Collection[int]) -> Mapping[int, int]:
        return dict.fromkeys(nodes, count_usable_cpus())

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        """Does nothing, because the driver's process needs no reservation."""

    def start_hosts(self, group: FailureGroup, kind: str, *, restarts: int) -> None:
        self._hosts |= {(slot.pool, slot.rank): Host() for slot in group.slots}

    def join(self, group: FailureGroup, kind: str) -> list[tuple[Slot, Ref]]:
        raise RuntimeError(f"the ranks of {group.name} communicate and need separate processes: use backend ray")

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        raise RuntimeError(f"the ranks of {role} communicate and need separate processes: use backend ray")

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        _, report = self._hosts[slot.pool, slot.rank].construct(construction)
        return LocalRef(report)

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        _, report = self._hosts[slot.pool, slot.rank].evict(role, rank, slot.node)
        return LocalRef(report)

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        # Copies objects, as calls between processes do. Arrays are shared, also between processes.
        objects = [value.with_own_objects() if isinstance(value := ref.get(), Payload) else value for ref in refs]
        arguments = {name: _with_own_objects(argument) for name, argument in request.arguments.items()}
        value, report = self._hosts[slot.pool, slot.rank].call(replace(request, arguments=arguments), *objects)
        return LocalRef(_snapshot(value, request)), LocalRef(report)

    def share(self, payload: Payload) -> Ref:
        return LocalRef(payload)

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        return list(refs)

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        return [ref.get() for ref in refs]

    def probe(self, slot: Slot) -> Ref:
        return LocalRef(None)

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        return {}

    def restart(self, slot: Slot, process_id: int | None) -> None:
        raise RuntimeError("the inline backend runs in the driver's process, which cannot be restarted")

    def restore(self, slot: Slot, plan: RecoveryPlan) -> Ref:
        return LocalRef(None)  # the driver's process is not replaced

    def describe_end(self, slot: Slot) -> str | None:
        return None

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        return []

    def lost_nodes(self) -> Mapping[int, str]:
        return {}

    def end_pool(self, name: str) -> None:
        for key in [key for key in self._hosts if key[0] == name]:
            self._hosts.pop(key).close()

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()


def _with_own_objects(argument: Any) -> Any:  # Any: an argument of any method
    """Returns a deep copy of an argument. Positions and row selections are shared, because hosts only read them."""
    match argument:
        case TableArgument(blocks=blocks):
            return replace(argument, blocks=tuple(block.with_own_objects() for block in blocks))
        case FutureArgument():
            return argument
    return copy.deepcopy(argument)


def _snapshot(value: Any, request: Request) -> Any:  # Any: a payload or a method's own result
    """Returns a deep copy of the result. Raises `WorkerError` if the result cannot be copied."""
    if isinstance(value, Payload):
        return value.copy()

    def describe(error: BaseException) -> WorkerError:
        return WorkerError(request.role, request.rank, request.node, request.method, describe_unpicklable(error))

    with convert_errors(describe):  # the result has any class
        return copy.deepcopy(value)
