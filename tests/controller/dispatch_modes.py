"""A custom dispatch mode that calls every second rank."""

from collections.abc import Sequence
from typing import Any

from flowrl import register_dispatch_mode
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Arguments, Contract


def to_every_second(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments | None]:
    return [arguments if rank % 2 == 0 else None for rank in range(mesh.size)]


def second_ranks(mesh: Mesh, results: Sequence[Any]) -> dict[int, Any]:
    return {2 * index: result for index, result in enumerate(results)}


EVERY_SECOND = register_dispatch_mode("every_second", to_every_second, second_ranks)
