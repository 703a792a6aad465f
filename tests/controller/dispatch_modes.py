"""A dispatch mode of a user's own: every second rank is called."""

from collections.abc import Sequence
from typing import Any

from flowrl.controller.dispatch import Arguments
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.register import Contract


def to_every_second(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments | None]:
    return [arguments if rank % 2 == 0 else None for rank in range(mesh.size)]


def second_ranks(mesh: Mesh, results: Sequence[Any]) -> dict[int, Any]:
    return {2 * place: result for place, result in enumerate(results)}
