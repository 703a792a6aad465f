"""The inline backend: every host in the driver's process, every call done when it returns. `breakpoint()` works."""

import copy
from collections.abc import Sequence
from typing import Any

from flowrl.config.base import Device
from flowrl.controller.host import Construction, Host
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Inventory, PoolPlan, Slot
from flowrl.controller.wire import Request
from flowrl.data.block import LocalRef, Ref
from flowrl.data.payload import Payload


class InlineBackend:
    """Runs ranks one after another. A failing call raises at once, with the worker's own frames below it."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, int], Host] = {}

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return local_inventory(device, devices)

    def start_pools(self, pools: Sequence[PoolPlan], kind: str) -> None:
        self._hosts |= {(pool.name, slot.rank): Host() for pool in pools for slot in pool.slots}

    def start_tasks(self, pool: PoolPlan) -> None:
        self.start_pools([pool], "cpu")

    def join(self, pool: PoolPlan, kind: str) -> list[Ref]:
        raise RuntimeError(f"the ranks of pool {pool.name} talk to each other, which takes processes: use backend ray")

    def construct(self, slot: Slot, construction: Construction) -> Ref:
        _, report = self._hosts[slot.pool, slot.rank].construct(construction)
        return LocalRef(report)

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref]) -> tuple[Ref, Ref]:
        # Between processes arguments are copies and a result is a snapshot. Here they would be the caller's own objects
        # and the worker's own buffers, so both are copied; the arrays of inputs are shared there as here.
        objects = [value.with_own_objects() if isinstance(value := ref.get(), Payload) else value for ref in refs]
        value, report = self._hosts[slot.pool, slot.rank].call(copy.deepcopy(request), *objects)
        snapshot = value.copy() if isinstance(value, Payload) else copy.deepcopy(value)
        return LocalRef(snapshot), LocalRef(report)

    def share(self, payload: Payload) -> Ref:
        return LocalRef(payload)

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        return list(refs)

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        return [ref.get() for ref in refs]

    def end_pool(self, name: str) -> None:
        self._hosts = {key: host for key, host in self._hosts.items() if key[0] != name}

    def close(self) -> None:
        self._hosts.clear()
