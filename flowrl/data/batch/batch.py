"""Batch: the driver's handle of rows x named columns, perhaps not computed yet. References and row indices, no tensors.

Every edit here (select, rows, repeat, ...) rewrites the index and moves nothing; values reach this process through
`get` alone. Names of columns: flowrl/data/batch/fields.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrl.data.batch.block import Block, Column, Description, LocalRef, Shard, read_together
from flowrl.data.batch.columns import compact, gathers, joined
from flowrl.data.batch.layout import Rows, shuffled
from flowrl.data.batch.payload import ColumnError, Payload, Source, collect, merge

if TYPE_CHECKING:
    from tensordict import TensorDict


class TaskRunner(Protocol):
    """Runs a pure function beside the data."""

    def apply(self, fn: Callable, batch: "Batch", writes: tuple[str, ...], rows: str, kwargs: dict) -> "Batch": ...

    def reduce(self, fn: Callable, batch: "Batch", kwargs: dict) -> Any: ...  # Any: a Future of the function's result


class Batch:
    """Rows x named columns by reference. Made by groups' calls, `Batch.from_rows` and `Batch.from_columns`."""

    def __init__(
        self, columns: Mapping[str, Column], num_rows: int | None = None, tasks: TaskRunner | None = None
    ) -> None:
        self._columns = dict(columns)
        self._num_rows = num_rows
        self._tasks = tasks
        self._sections = 1

    # Making one.

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> "Batch":
        """Rows as dictionaries with the same keys; numbers become arrays, everything else objects."""
        names = list(rows[0]) if rows else []
        for number, row in enumerate(rows):
            if list(row) != names and set(row) != set(names):
                raise ColumnError(
                    f"row {number} has columns {', '.join(row)}, row 0 has {', '.join(names)}; give all rows the same"
                )
        return Batch.from_columns(rows={name: [row[name] for row in rows] for name in names}, num_rows=len(rows))

    @staticmethod
    def from_columns(
        rows: Mapping[str, Any] | None = None,
        tokens: Mapping[str, Any] | None = None,
        lengths: Sequence[int] | np.ndarray | None = None,
        num_rows: int | None = None,
    ) -> "Batch":
        """Row columns of B values each and flat token columns of T values, with `lengths` [B] summing to T."""
        arrays = {name: _row_column(values) for name, values in (rows or {}).items()}
        flat = {name: np.asarray(values).copy(order="C") for name, values in (tokens or {}).items()}
        sizes = {name: len(values) for name, values in arrays.items()} | (
            {} if lengths is None else {"lengths": len(lengths)}
        )
        count = num_rows if num_rows is not None else next(iter(sizes.values()), 0)
        if any(size != count for size in sizes.values()):
            raise ColumnError(f"columns of one batch have the same number of rows, but these have {sizes}")
        total = None if lengths is None else int(np.sum(lengths))
        if any(len(values) != total for values in flat.values()):
            found = {name: len(values) for name, values in flat.items()}
            raise ColumnError(
                f"token columns need lengths that sum to their tokens: lengths sum to {total}, tokens are {found}"
            )
        array = None if lengths is None or not flat else np.array(lengths, dtype=np.int64)
        return Batch.of_payload(Payload(count, arrays, flat, array))

    @staticmethod
    def of_payload(payload: Payload) -> "Batch":
        shard = Shard(LocalRef(payload), LocalRef(Description.of(payload)), payload.num_rows)
        return Batch.of_block(Block([shard]), payload.columns)

    @staticmethod
    def of_block(
        block: Block, columns: Iterable[str], index: np.ndarray | None = None, tasks: TaskRunner | None = None
    ) -> "Batch":
        """A view of a whole block, its rows taken by `index`."""
        known = all(shard.num_rows is not None for shard in block.shards)
        num_rows = len(index) if index is not None else block.num_rows if known else None
        return Batch({name: Column(block, index, name) for name in columns}, num_rows, tasks)

    # What it is.

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    @property
    def num_rows(self) -> int:
        """The number of rows; waits only where a result's contract leaves it open (`rows="unknown"`)."""
        if self._num_rows is None and not self._columns:
            return 0
        if self._num_rows is None:
            column = next(iter(self._columns.values()))
            self._num_rows = column.block.num_rows if column.index is None else len(column.index)
        return self._num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        count = "?" if self._num_rows is None else self._num_rows
        return f"Batch({count} rows: {', '.join(self.columns)})"

    @property
    def tasks(self) -> TaskRunner | None:
        """Where `apply` runs; None until a column comes from a worker group."""
        return self._tasks

    def column(self, name: str) -> Column:
        """Where a column's values are. Raises `ColumnError` if there is no such column."""
        if name not in self._columns:
            raise ColumnError(f"the batch has no column {name!r}; it has {', '.join(self.columns) or 'none'}")
        return self._columns[name]

    def done(self) -> bool:
        """Whether every column is computed."""
        return all(block.done() for block in {column.block for column in self._columns.values()})

    # Edits of the index.

    def __getitem__(self, name: str) -> "Batch":
        return self.select(name)

    def __setitem__(self, name: str, value: "Batch") -> None:
        """Adds the only column of `value` under this name."""
        if not isinstance(value, Batch) or len(value.columns) != 1:
            found = ", ".join(value.columns) if isinstance(value, Batch) else type(value).__name__
            raise ColumnError(f"batch[{name!r}] takes a batch of one column, not {found}; use union for several")
        self._num_rows = self._check_rows(value, name)
        self._columns[name] = value._columns[value.columns[0]]
        self._tasks = self._tasks or value._tasks

    def select(self, *names: str) -> "Batch":
        """Only these columns."""
        return self._with({name: self.column(name) for name in names}, self._num_rows)

    def drop(self, *names: str) -> "Batch":
        """All columns but these."""
        return self.select(*(name for name in self._columns if name not in {self.column(n) and n for n in names}))

    def rename(self, names: Mapping[str, str]) -> "Batch":
        """Columns under new names: `{"old": "new"}`."""
        for name in names:
            self.column(name)
        renamed = [names.get(name, name) for name in self._columns]
        if len(set(renamed)) < len(renamed):
            raise ColumnError(f"rename would give two columns one name: {', '.join(renamed)}")
        columns = {names.get(name, name): column for name, column in self._columns.items()}
        return self._with(columns, self._num_rows)

    def union(self, other: "Batch") -> "Batch":
        """The columns of both; a column of `other` replaces one of the same name."""
        num_rows = self._check_rows(other, ", ".join(other.columns))
        merged = Batch(self._columns | other._columns, num_rows, self._tasks or other._tasks)
        return merged.in_sections(max(self._sections, other._sections))

    def _with(self, columns: Mapping[str, Column], num_rows: int | None) -> "Batch":
        """The same rows with other columns."""
        return Batch(columns, num_rows, self._tasks).in_sections(self._sections)

    def _check_rows(self, other: "Batch", what: str) -> int | None:
        """The rows of both, None while neither count is known. A batch without columns takes any."""
        if not self._columns:
            return other._num_rows
        known = self._num_rows is not None and other._num_rows is not None
        if known and self._num_rows != other._num_rows:
            raise ColumnError(
                f"{what} has {other._num_rows} rows, the batch has {self._num_rows}; they must describe the same rows"
            )
        return other._num_rows if self._num_rows is None else self._num_rows

    def rows(self, rows: slice | Sequence[int] | np.ndarray) -> "Batch":
        """The rows at a slice, at positions, or where a bool mask is true."""
        if isinstance(rows, slice):
            positions = np.arange(*rows.indices(self.num_rows))
        else:
            positions = np.asarray(rows)
            if positions.dtype == bool:
                self._check_mask(positions)
                positions = np.flatnonzero(positions)
            positions = positions.astype(np.int64)
        if len(positions) and (positions.min() < 0 or positions.max() >= self.num_rows):
            raise ColumnError(
                f"rows {positions.min()} to {positions.max()} are asked for, the batch has 0 to {self.num_rows - 1}"
            )
        return self._taken(positions)

    def _check_mask(self, mask: np.ndarray) -> None:
        if len(mask) != self.num_rows:
            raise ColumnError(f"a mask of {len(mask)} rows cannot choose among {self.num_rows}; give one bool per row")

    def _taken(self, positions: np.ndarray) -> "Batch":
        composed: dict[int | None, np.ndarray] = {}
        columns = {}
        for name, column in self._columns.items():
            key = None if column.index is None else id(column.index)
            if key not in composed:
                composed[key] = positions if column.index is None else column.index[positions]
            columns[name] = Column(column.block, composed[key], column.source)
        return Batch(columns, len(positions), self._tasks)

    def reorder(self, order: Sequence[int] | np.ndarray) -> "Batch":
        """The same rows in another order, a permutation of all positions."""
        positions = np.asarray(order, dtype=np.int64)
        if not _is_permutation(positions, self.num_rows):
            raise ColumnError(
                f"an order of {self.num_rows} rows names each of 0 to {self.num_rows - 1} once; use rows() to choose"
            )
        return self._taken(positions)

    def repeat(self, times: int, *, interleave: bool = True) -> "Batch":
        """Each row `times` times: 0 0 1 1 with `interleave`, else 0 1 0 1."""
        once = np.arange(self.num_rows)
        return self._taken(np.repeat(once, times) if interleave else np.tile(once, times))

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """The rows of several batches with the same columns, one after another."""
        if not batches:
            raise ColumnError("concat needs at least one batch")
        names = batches[0].columns
        for batch in batches:
            if set(batch.columns) != set(names):
                raise ColumnError(f"concat needs the same columns everywhere, but finds {names} and {batch.columns}")
        columns = joined(names, [batch._columns for batch in batches])
        tasks = next((batch.tasks for batch in batches if batch.tasks), None)
        return Batch(columns, sum(batch.num_rows for batch in batches), tasks)

    def minibatches(self, rows: int, *, epochs: int = 1, seed: int | Sequence[int] = 0) -> Iterator["Batch"]:
        """Every row once per epoch in a random order that depends on `seed` and the epoch alone.

        Yields batches of `rows` rows; the last of an epoch has what is left.
        """
        if rows < 1:
            raise ValueError(f"a minibatch has {rows} rows; ask for at least 1")
        for epoch in range(epochs):
            chance = np.random.default_rng([*np.atleast_1d(seed), epoch])
            order = shuffled(chance, self.num_rows, rows, self._sections)
            for start in range(0, self.num_rows, rows):
                yield self._taken(order[start : start + rows])

    def in_sections(self, count: int) -> "Batch":
        """The same rows, as so many equal stretches of which each minibatch has an equal part, in their order: what
        one data-parallel rank of as many is to read stays its own. Holds until rows are chosen or ordered otherwise."""
        result = Batch(self._columns, self._num_rows, self._tasks)
        result._sections = count
        return result

    def compacted(self) -> "Batch":
        """The same rows, holding less memory: a buffer of few rows of many batches then keeps little more than its own.

        Shards of which fewer than half of the rows are in this batch are read into new ones, as a task beside the data;
        they are freed with the last batch that has them. Does not wait, except for the counts of rows not known yet.
        """
        return self._with(compact(self._columns, self._rewrite), self._num_rows)

    def _rewrite(self, columns: dict[str, Column], num_rows: int) -> Block:
        view = Batch(columns, num_rows, self._tasks)
        result = (self._tasks or LocalTasks()).apply(_unchanged, view, view.columns, "same", {})
        return result.column(view.columns[0]).block

    # Values.

    def payload(self, *names: str) -> Payload:
        """The values of these columns (all without names) in this process, as NumPy arrays; waits for them."""
        return assemble(self, names or self.columns, (0, self.num_rows))

    def table(self, *names: str) -> "TensorDict":
        """The values of these columns (all without names) as a worker would see them; waits for them."""
        from flowrl.data.batch.tensordicts import to_table  # noqa: PLC0415 (a driver that reads no values needs no torch)

        return to_table(self.payload(*names), copy=True)

    def get(self, name: str) -> Any:  # Any: a tensor or a list, as the column's kind says
        """One column's values: a tensor `[B, ...]` or `[T, ...]`, or a list of B objects. `length` is `[B]`.

        Raises whatever the call that computes them raised.
        """
        if name == "length" and name not in self._columns:
            import torch  # noqa: PLC0415 (see table)

            return torch.from_numpy(self.lengths().copy())
        payload = self.payload(name)
        column = payload.rows.get(name)
        if isinstance(column, list):
            return copy.deepcopy(column)
        from flowrl.data.batch.tensordicts import to_table  # noqa: PLC0415 (see table)

        return to_table(payload, copy=True)["tokens" if name in payload.tokens else "rows", name]

    def _token_column(self) -> tuple[str]:
        for name, column in self._columns.items():
            if column.block.kind(column.source) == "token":
                return (name,)
        raise ColumnError(
            f"the batch has no token column, so its rows have no length; it has {', '.join(self.columns)}"
        )

    def lengths(self) -> np.ndarray:
        """Tokens per row `[B]`, from the descriptions alone: no column travels."""
        column = self.column(self._token_column()[0])
        lengths = column.block.lengths()
        assert lengths is not None
        return lengths if column.index is None else lengths[column.index]

    def apply(
        self, fn: Callable, reads: Sequence[str], writes: Sequence[str], *, rows: str = "same", **kwargs: Any
    ) -> "Batch":
        """Runs `fn(table, **kwargs) -> table` over the whole batch, as one task beside the data.

        Returns this batch with the columns `writes` added, or, when `rows="unknown"` (the function drops or adds rows),
        only what the function wrote. Does not wait.
        """
        read = self.select(*reads)
        result = (self._tasks or LocalTasks()).apply(fn, read, tuple(writes), rows, kwargs)
        return self.union(result) if rows == "same" else result

    def reduce(
        self, fn: Callable, reads: Sequence[str], **kwargs: Any
    ) -> Any:  # Any: a Future of the function's result
        """Runs `fn(table, **kwargs)` beside the data and returns a future of its (small) result."""
        return (self._tasks or LocalTasks()).reduce(fn, self.select(*reads), kwargs)


def _unchanged(table: "TensorDict") -> "TensorDict":
    return table


class LocalTasks:
    """Runs `apply` and `reduce` in this process: for batches that no worker group has touched yet."""

    def apply(self, fn: Callable, batch: Batch, writes: tuple[str, ...], rows: str, kwargs: dict) -> Batch:
        from flowrl.data.batch.tensordicts import from_table  # noqa: PLC0415 (see Batch.table)

        payload = batch.payload()
        result = from_table(fn(batch.table(), **_read(kwargs)), payload.lengths)
        if set(result.columns) != set(writes):
            raise ColumnError(f"{fn.__name__} wrote {', '.join(result.columns)} where {', '.join(writes)} is declared")
        return Batch.of_payload(result)

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict) -> LocalRef:
        return LocalRef(fn(batch.table(), **_read(kwargs)))


def _read(kwargs: dict) -> dict:
    """Arguments with the results of earlier calls in the place of their references."""
    return {name: value.get() if isinstance(value, LocalRef) else value for name, value in kwargs.items()}


def assemble(batch: Batch, names: Sequence[str], rows: Rows) -> Payload:
    """Reads some rows of some columns into this process."""
    plans = list(gathers({name: batch.column(name) for name in names}, rows))
    shards = [block.shards[piece.shard] for block, _, plan in plans for piece in plan.pieces]
    payloads = iter(read_together([shard.payload for shard in shards]))
    parts = []
    for block, columns, plan in plans:
        named = [(piece, block.shards[piece.shard].sources(columns)) for piece in plan.pieces]
        sources = [Source(next(payloads), own, piece.rows, piece.at) for piece, own in named]
        parts.append(collect(plan.num_rows, sources))
    merged = merge(parts) if parts else Payload(batch.num_rows)
    return merged.take(None, {name: name for name in names})


def _is_permutation(positions: np.ndarray, num_rows: int) -> bool:
    if len(positions) != num_rows or (num_rows and (positions.min() < 0 or positions.max() >= num_rows)):
        return False
    seen = np.zeros(num_rows, dtype=bool)
    seen[positions] = True
    return bool(seen.all())


def _row_column(values: Any) -> np.ndarray | list:
    """Numbers of one kind and arrays as an array of their own, anything else as a list of objects.

    What a worker reads of a row must not depend on the rows beside it: integers and floats are kept whole, in 64 bits,
    and a mixture stays objects.
    """
    if hasattr(values, "numpy") or isinstance(values, np.ndarray):
        array = np.asarray(values).copy(order="C")
        return array if array.dtype.kind in "biufc" else array.tolist()
    listed = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = {type(value) for value in listed}
    fits = kinds != {int} or max(map(abs, listed)) < 2**63
    return np.array(listed) if len(kinds) == 1 and kinds < {bool, int, float} and fits else listed
