"""Dispatch modes: how a call's arguments are scattered over ranks, and how the ranks' results become one.

A mode is a pair of pure functions on a mesh. What is split is declared by the mode, never guessed from an argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.register import Contract, Dispatch
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.fields import FIELDS
from flowrl.data.batch.layout import Rows, split_by_weight, split_evenly
from flowrl.data.metric import merge_metrics

Arguments = dict[str, Any]
"""Parameter name -> argument, bound to the method's signature; Any: users' own values."""
Scatter = Callable[[Mesh, Contract, Arguments], Sequence[Arguments | None]]
Gather = Callable[[Mesh, Sequence], Any]


@dataclass(frozen=True)
class Part:
    """A batch argument on its way to one rank: these rows of these columns."""

    batch: Batch
    rows: Rows
    columns: tuple[str, ...]


@dataclass(frozen=True)
class DispatchMode:
    """A named pair. `gather` is None where the result is a `Batch` of the leaders' shards."""

    name: str
    scatter: Scatter
    gather: Gather | None


_modes: dict[str, DispatchMode] = {}


def register_dispatch_mode(name: str, scatter: Scatter, gather: Gather) -> None:
    """Adds a dispatch mode for `register(dispatch_mode=name)`.

    Args:
        name: not the name of a built-in mode.
        scatter: `(mesh, contract, arguments) -> one dictionary of arguments per rank`, None for a rank that is not
            called. A batch argument becomes a `Part`. `mesh` has `size`, the sizes `dp`, `tp`, `sp`, `pp`, and
            `coordinates(rank)`.
        gather: `(mesh, results) -> value`; `results` has an entry per called rank, in rank order. It must be
            importable, for futures that are passed on before they are there.
    Raises:
        ValueError: the name is a built-in mode's.
    """
    if name in BUILT_IN:
        raise ValueError(f"dispatch mode {name!r} is built in and cannot be replaced; choose another name")
    _modes[name] = DispatchMode(name, scatter, gather)


def dispatch_mode(name: str) -> DispatchMode:
    """The mode of this name. Raises `ContractError` that lists the known ones."""
    known = BUILT_IN | _modes
    if name not in known:
        raise ContractError(
            f"dispatch mode {name!r} is unknown; known are {', '.join(known)}; register_dispatch_mode adds others"
        )
    return known[name]


def dp_rank(mesh: Mesh, rank: int) -> int:
    """The data-parallel coordinate of a rank."""
    return mesh.coordinates(rank).dp


def is_leader(mesh: Mesh, rank: int) -> bool:
    """Whether this rank answers for its data-parallel rank: first of its tp and sp peers, last pipeline stage."""
    at = mesh.coordinates(rank)
    return at.tp == 0 and at.sp == 0 and at.pp == mesh.pp - 1


def leaders(mesh: Mesh) -> list[int]:
    """The answering rank of every data-parallel rank, in data-parallel order."""
    return sorted((r for r in range(mesh.size) if is_leader(mesh, r)), key=lambda rank: dp_rank(mesh, rank))


def _same_to_all(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    return [_whole_batches(contract, arguments) for _ in range(mesh.size)]


def _one_each(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    _check_lists(arguments, mesh.size, "rank")
    return [
        _whole_batches(contract, {name: values[rank] for name, values in arguments.items()})
        for rank in range(mesh.size)
    ]


def _one_per_dp_rank(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    _check_lists(arguments, mesh.dp, "data-parallel rank")
    own = [_whole_batches(contract, {name: values[dp] for name, values in arguments.items()}) for dp in range(mesh.dp)]
    return [own[dp_rank(mesh, rank)] for rank in range(mesh.size)]


def _first_only(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments | None]:
    return [_whole_batches(contract, arguments), *[None] * (mesh.size - 1)]


def _check_lists(arguments: Arguments, size: int, what: str) -> None:
    for name, values in arguments.items():
        if not isinstance(values, list | tuple) or len(values) != size:
            found = f"{len(values)} entries" if isinstance(values, list | tuple) else type(values).__name__
            raise ContractError(f"argument {name!r} must be a list with one entry per {what} ({size}), not {found}")


def _whole_batches(contract: Contract, arguments: Arguments) -> Arguments:
    return {
        name: Part(value, (0, value.num_rows), read_columns(contract, name, value))
        if isinstance(value, Batch)
        else value
        for name, value in arguments.items()
    }


def split_rows(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    """Splits every batch argument by rows over the data-parallel ranks; peers of one rank get the same rows."""
    batches = {name: value for name, value in arguments.items() if isinstance(value, Batch)}
    if not batches:
        raise ContractError("a call that splits rows needs a Batch among its arguments, and got none")
    counts = {name: batch.num_rows for name, batch in batches.items()}
    if len(set(counts.values())) > 1:
        raise ContractError(f"batches of one call must have the same number of rows, but have {counts}")
    columns = {name: read_columns(contract, name, batch) for name, batch in batches.items()}
    parts = split(next(iter(batches.values())), mesh.dp, contract)
    per_dp = [arguments | {name: Part(batch, rows, columns[name]) for name, batch in batches.items()} for rows in parts]
    return [per_dp[dp_rank(mesh, rank)] for rank in range(mesh.size)]


def split(batch: Batch, num_parts: int, contract: Contract) -> list[Rows]:
    """The rows of every data-parallel rank: contiguous and even, or balanced by tokens."""
    if contract.balance == "tokens" and num_parts > 1:
        return list(split_by_weight(batch.lengths(), num_parts))
    return list(split_evenly(batch.num_rows, num_parts))


def order_of(parts: Sequence[Rows]) -> np.ndarray | None:
    """For results that come back part after part: which of their rows is row i of the batch. None: in order."""
    if all(isinstance(rows, tuple) for rows in parts):
        return None
    positions = np.concatenate([np.arange(*rows) if isinstance(rows, tuple) else rows for rows in parts])
    order = np.empty_like(positions)
    order[positions] = np.arange(len(positions))
    return order


def read_columns(contract: Contract, parameter: str, batch: Batch) -> tuple[str, ...]:
    """The columns that travel. Raises `ContractError` naming the missing ones, before anything is sent."""
    reads = contract.reads_of(parameter)
    if reads is None:
        return batch.columns
    missing = [name for name in reads if not name.endswith("?") and name != "*" and name not in batch]
    if missing:
        raise ContractError(
            f"the batch lacks {', '.join(map(repr, missing))}, which the method reads; it has "
            f"{', '.join(batch.columns) or 'no columns'}; compute the column first and store it in the batch"
        )
    named = [name.removesuffix("?") for name in reads if name.removesuffix("?") in batch]
    own = [name for name in batch.columns if name not in FIELDS] if "*" in reads else []
    return tuple(dict.fromkeys([*named, *own]))


def _as_list(mesh: Mesh, results: Sequence) -> list:
    return list(results)


def _leaders_only(mesh: Mesh, results: Sequence) -> list:
    return [results[rank] for rank in leaders(mesh)]


def _first(mesh: Mesh, results: Sequence) -> Any:
    return results[0]


def _merged(mesh: Mesh, results: Sequence) -> dict:
    return merge_metrics(_leaders_only(mesh, results))


BUILT_IN = {
    mode.name: mode
    for mode in (
        DispatchMode(Dispatch.ONE_TO_ALL, _same_to_all, _as_list),
        DispatchMode(Dispatch.ALL_TO_ALL, _one_each, _as_list),
        DispatchMode(Dispatch.ALL_TO_ONE, _same_to_all, _first),
        DispatchMode(Dispatch.RANK_ZERO, _first_only, _first),
        DispatchMode(Dispatch.DP_COMPUTE, _one_per_dp_rank, _leaders_only),
        DispatchMode(Dispatch.DP_COMPUTE_PROTO, split_rows, None),
        DispatchMode(Dispatch.COLLECT, _same_to_all, None),
        DispatchMode(Dispatch.DP_COMPUTE_METRIC, split_rows, _merged),
    )
}
