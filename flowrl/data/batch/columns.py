"""Columns of a batch: reading their rows, joining them over several batches, and letting go of rows nobody takes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from flowrl.data.batch.block import Block, Column
from flowrl.data.batch.layout import Compaction, GatherPlan, Rows, block_rows, compaction, gather

Rewrite = Callable[[dict[str, Column], int], Block]
"""Computes columns of so many rows anew: `{name in the block to make: where it is now}`."""


def gathers(columns: Mapping[str, Column], rows: Rows) -> Iterator[tuple[Block, dict[str, str], GatherPlan]]:
    """Per block that the columns are in: `{name: name in the block}`, and which of its shards' rows to read.

    Blocks that share an index and the sizes of their shards share a plan.
    """
    together: dict[tuple[int, int | None], dict[str, Column]] = {}
    for name, column in columns.items():
        together.setdefault((id(column.block), _identity(column.index)), {})[name] = column
    plans: dict[tuple[int | None, bytes], GatherPlan] = {}
    for (_, index_id), own in together.items():
        block, index, _ = next(iter(own.values()))
        key = (index_id, block.layout)
        if key not in plans:
            plans[key] = gather(block.sizes, block_rows(index, rows))
        yield block, {name: column.source for name, column in own.items()}, plans[key]


def joined(names: Sequence[str], parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The columns with the rows of all parts, one after another. Indices of equal parts become one index."""
    together: dict[tuple, list[str]] = {}
    for name in names:
        key = tuple((id(part[name].block), _identity(part[name].index)) for part in parts)
        together.setdefault(key, []).append(name)
    columns: dict[str, Column] = {}
    indices: dict[tuple, np.ndarray] = {}
    for key, own in together.items():
        first = [part[own[0]] for part in parts]
        block, sources = _joined_block(own, parts)
        index = None
        if any(column.index is not None for column in first):
            shape = tuple((index_id, c.block.num_rows) for (_, index_id), c in zip(key, first, strict=True))
            if shape not in indices:
                indices[shape] = _joined_index(first)
            index = indices[shape]
        columns |= {name: Column(block, index, source) for name, source in sources.items()}
    return {name: columns[name] for name in names}


def _joined_block(names: Sequence[str], parts: Sequence[Mapping[str, Column]]) -> tuple[Block, dict[str, str]]:
    """One block over the blocks of the parts, and what it calls each column."""
    sources = {name: {part[name].source for part in parts} for name in names}
    if all(len(found) == 1 for found in sources.values()):
        shards = [shard for part in parts for shard in part[names[0]].block.shards]
        return Block(shards), {name: found.pop() for name, found in sources.items()}
    # Parts call a column otherwise, so each shard says what its own payload calls it.
    renamed = []
    for part in parts:
        own = {name: part[name].source for name in names}
        renamed += [shard.renamed(own) for shard in part[names[0]].block.shards]
    return Block(renamed), {name: name for name in names}


def _joined_index(columns: Sequence[Column]) -> np.ndarray:
    offset, indices = 0, []
    for block, index, _ in columns:
        size = block.num_rows
        indices.append(np.arange(offset, offset + size) if index is None else index + offset)
        offset += size
    return np.concatenate(indices)


def compact(columns: Mapping[str, Column], rewrite: Rewrite) -> dict[str, Column]:
    """The same rows without the shards of which fewer than half of the rows are taken.

    The rows that are taken of those go into new shards. A block without such shards stays as it is.
    """
    together: dict[int, dict[str, Column]] = {}
    for name, column in columns.items():
        together.setdefault(id(column.block), {})[name] = column
    result = dict(columns)
    composed: dict[tuple, tuple[Compaction | None, dict[int, np.ndarray]]] = {}
    for own in together.values():
        block = next(iter(own.values())).block
        indices = {id(column.index): column.index for column in own.values()}
        key = (block.layout, *indices)
        if key not in composed:
            composed[key] = _composed(block.sizes, indices)
        plan, placed = composed[key]
        if plan is not None:
            smaller = _rewritten(block, plan, {column.source for column in own.values()}, rewrite)
            result |= {name: Column(smaller, placed[id(c.index)], c.source) for name, c in own.items()}
    return result


def _composed(
    sizes: np.ndarray, indices: Mapping[int, np.ndarray | None]
) -> tuple[Compaction | None, dict[int, np.ndarray]]:
    """What to rewrite of a block that batches read through these indices, and the indices afterwards."""
    held = {key: index for key, index in indices.items() if index is not None}
    if len(held) < len(indices):
        return None, {}
    taken = np.zeros(int(sizes.sum()), dtype=bool)
    for index in held.values():
        taken[index] = True
    plan = compaction(sizes, taken)
    return plan, {} if plan is None else {key: plan.places[index] for key, index in held.items()}


def _rewritten(block: Block, plan: Compaction, names: Collection[str], rewrite: Rewrite) -> Block:
    shards = [shard for shard, leaves in zip(block.shards, plan.rewritten, strict=True) if not leaves]
    # A block has a shard, even of no rows: it knows the columns.
    if len(plan.moved) or not shards:
        made = rewrite({name: Column(block, plan.moved, name) for name in sorted(names)}, len(plan.moved))
        shards += made.shards
    return Block(shards)


def _identity(index: np.ndarray | None) -> int | None:
    return None if index is None else id(index)
