"""Dispatch modes: pairs of pure functions that scatter arguments over ranks and gather the results of the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from flowrl.controller.errors import ContractError
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Arguments, Contract, Dispatch, DispatchMode, Gather, Scatter
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Ref, Rows, split_by_weight, split_evenly, split_groups
from flowrl.data.batch.fields import FIELDS
from flowrl.data.metric import merge_metrics

Fetch = Callable[[Sequence[Ref], float | None], list[Any]]
"""(references, timeout in seconds or None) -> values of the references, after the calls that compute them."""


Value = TypeVar("Value", covariant=True)


class Future(Generic[Value]):
    """Result of a call, possibly not computed yet. Other calls accept a future as an argument."""

    def __init__(self, refs: Sequence[Ref], gather: Gather, mesh: Mesh, fetch: Fetch) -> None:
        self.refs = tuple(refs)
        self.gather = gather
        self.mesh = mesh
        self._fetch = fetch

    def get(self, timeout_s: float | None = None) -> Value:
        """Waits for the call and returns its gathered result.

        Raises:
            WorkerError: the call, or another call to the same processes, failed.
            TimeoutError: the result is not available after `timeout_s` seconds.
        """
        return self.gather(self.mesh, self._fetch(self.refs, timeout_s))

    def done(self) -> bool:
        return all(ref.done() for ref in self.refs)


Passed = TypeVar("Passed")
OrFuture: TypeAlias = Passed | Future[Passed]
"""Type of a call's argument: a value, or a future of the value. The worker receives the value in both cases."""


@dataclass(frozen=True)
class BatchSlice:
    """Rows and columns of a batch argument that one rank receives."""

    batch: Batch
    rows: Rows
    columns: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0] if isinstance(self.rows, tuple) else len(self.rows)


_modes: dict[str, DispatchMode] = {}


def register_dispatch_mode(name: str, scatter: Scatter, gather: Gather) -> DispatchMode:
    """Creates a dispatch mode and returns it, for `@register(mode)`. Replaces an earlier mode with the same name.

    Args:
        name: any name except that of a built-in mode.
        scatter: `(mesh, contract, arguments) -> [arguments of each rank]`, with None for a rank that is not called.
            Converts batch arguments to `BatchSlice`s.
        gather: `(mesh, results) -> value`, with one result per called rank, in rank order. Must be importable, because
            workers gather futures that they receive as arguments.
    Raises:
        ValueError: a built-in mode has this name, or `scatter` or `gather` is not a function.
    """
    if name in BUILT_IN:
        raise ValueError(f"dispatch mode {name!r} is built in and cannot be replaced; choose another name")
    for parameter, function in (("scatter", scatter), ("gather", gather)):
        if not callable(function):
            raise ValueError(f"{parameter} of dispatch mode {name!r} is {function!r}, but must be a function")
    _modes[name] = DispatchMode(name, scatter, gather)
    return _modes[name]


def get_dispatch_mode(name: str) -> DispatchMode:
    """Returns a dispatch mode by its name in a contract. `register` has checked that the mode exists."""
    return (BUILT_IN | _modes)[name]


def get_dp_rank(mesh: Mesh, rank: int) -> int:
    return mesh.coordinates(rank).dp


def is_leader(mesh: Mesh, rank: int) -> bool:
    """Returns whether a rank is the leader of its data-parallel replica. Leaders return the results of calls.

    Leaders have tensor- and sequence-parallel coordinate 0 in the last pipeline stage.
    """
    coordinates = mesh.coordinates(rank)
    return coordinates.tp == 0 and coordinates.sp == 0 and coordinates.pp == mesh.pp - 1


def get_leader_ranks(mesh: Mesh) -> list[int]:
    """Returns one leader rank per data-parallel replica, in data-parallel order."""
    return sorted((r for r in range(mesh.size) if is_leader(mesh, r)), key=lambda rank: get_dp_rank(mesh, rank))


def scatter_rows(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    """Splits the rows of batch arguments over data-parallel replicas. All ranks of a replica get the same rows.

    Raises `ContractError` if no argument is a batch, or if the batches have different numbers of rows.
    """
    batches = {name: value for name, value in arguments.items() if isinstance(value, Batch)}
    if not batches:
        raise ContractError("the dispatch mode splits rows, but no argument is a Batch; pass one")
    counts = {name: batch.num_rows for name, batch in batches.items()}
    if len(set(counts.values())) > 1:
        raise ContractError(f"the batches of one call must have the same number of rows, but have {counts}")
    columns = {name: select_columns(contract, name, batch) for name, batch in batches.items()}
    splits = split_batch(next(iter(batches.values())), mesh.dp, contract)
    per_dp_rank = [
        arguments | {name: BatchSlice(batch, rows, columns[name]) for name, batch in batches.items()} for rows in splits
    ]
    return [per_dp_rank[get_dp_rank(mesh, rank)] for rank in range(mesh.size)]


def split_batch(batch: Batch, num_parts: int, contract: Contract) -> list[Rows]:
    """Splits the rows of a batch into `num_parts` contiguous parts of equal size, or into parts balanced by tokens.

    Rows with the same value in the column `contract.groups` stay in one part. A batch with sections is not balanced by
    tokens, so that its rows stay on the same rank (`Batch.with_sections`).
    """
    if contract.groups is not None and num_parts > 1:
        weights_N = batch.lengths() if contract.balance == "tokens" else None
        return split_groups(batch.group_ids(contract.groups), num_parts, weights_N)
    if contract.balance == "tokens" and num_parts > 1 and batch.num_sections == 1:
        return list(split_by_weight(batch.lengths(), num_parts))
    return list(split_evenly(batch.num_rows, num_parts))


def find_row_order(splits: Sequence[Rows]) -> np.ndarray | None:
    """Returns the permutation that restores the input order of concatenated results; None if they are in order."""
    if all(isinstance(rows, tuple) for rows in splits):
        return None
    positions = np.concatenate([np.arange(*rows) if isinstance(rows, tuple) else rows for rows in splits])
    order = np.empty_like(positions)
    order[positions] = np.arange(len(positions))
    return order


def select_columns(contract: Contract, parameter: str, batch: Batch) -> tuple[str, ...]:
    """Returns the columns that a method reads. Raises `ContractError` if the batch lacks a required column."""
    reads = contract.get_reads(parameter)
    if reads is None:
        return batch.columns
    missing = [name for name in reads if not name.endswith("?") and name != "*" and name not in batch]
    if missing:
        raise ContractError(
            f"the batch lacks {', '.join(map(repr, missing))}, which the method reads; it has "
            f"{', '.join(batch.columns) or 'no columns'}; compute the column first and store it in the batch"
        )
    named = [name.removesuffix("?") for name in reads if name.removesuffix("?") in batch]
    from_dataset = [name for name in batch.columns if name not in FIELDS] if "*" in reads else []
    return tuple(dict.fromkeys([*named, *from_dataset]))


def _slice_batches(contract: Contract, arguments: Arguments) -> Arguments:
    return {
        name: BatchSlice(value, (0, value.num_rows), select_columns(contract, name, value))
        if isinstance(value, Batch)
        else value
        for name, value in arguments.items()
    }


def _scatter_same(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    return [_slice_batches(contract, arguments) for _ in range(mesh.size)]


def _scatter_per_rank(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    _check_list_lengths(arguments, mesh.size, "rank")
    return [
        _slice_batches(contract, {name: values[rank] for name, values in arguments.items()})
        for rank in range(mesh.size)
    ]


def _scatter_per_dp_rank(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments]:
    _check_list_lengths(arguments, mesh.dp, "data-parallel rank")
    per_dp_rank = [
        _slice_batches(contract, {name: values[dp] for name, values in arguments.items()}) for dp in range(mesh.dp)
    ]
    return [per_dp_rank[get_dp_rank(mesh, rank)] for rank in range(mesh.size)]


def _scatter_to_rank_zero(mesh: Mesh, contract: Contract, arguments: Arguments) -> list[Arguments | None]:
    return [_slice_batches(contract, arguments), *[None] * (mesh.size - 1)]


def _check_list_lengths(arguments: Arguments, size: int, unit: str) -> None:
    for name, values in arguments.items():
        if not isinstance(values, list | tuple) or len(values) != size:
            actual = f"{len(values)} entries" if isinstance(values, list | tuple) else type(values).__name__
            raise ContractError(f"argument {name!r} must be a list with one entry per {unit} ({size}), not {actual}")


def _gather_list(mesh: Mesh, results: Sequence) -> list:
    return list(results)


def _gather_leaders(mesh: Mesh, results: Sequence) -> list:
    return [results[rank] for rank in get_leader_ranks(mesh)]


def _gather_first(mesh: Mesh, results: Sequence) -> Any:
    return results[0]


def _gather_metrics(mesh: Mesh, results: Sequence) -> dict:
    return merge_metrics(_gather_leaders(mesh, results))


BUILT_IN = {
    mode.name: mode
    for mode in (
        DispatchMode(Dispatch.ONE_TO_ALL, _scatter_same, _gather_list),
        DispatchMode(Dispatch.ALL_TO_ALL, _scatter_per_rank, _gather_list),
        DispatchMode(Dispatch.ALL_TO_ONE, _scatter_same, _gather_first),
        DispatchMode(Dispatch.RANK_ZERO, _scatter_to_rank_zero, _gather_first),
        DispatchMode(Dispatch.DP_COMPUTE, _scatter_per_dp_rank, _gather_leaders),
        DispatchMode(Dispatch.DP_COMPUTE_PROTO, scatter_rows, None),
        DispatchMode(Dispatch.COLLECT, _scatter_same, None),
        DispatchMode(Dispatch.DP_COMPUTE_METRIC, scatter_rows, _gather_metrics),
    )
}
