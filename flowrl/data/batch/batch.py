"""Batch: a table of rows and named columns, stored as references. The driver edits only row indices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrl.config.user_errors import UserError
from flowrl.data.batch.block import (
    Block,
    Column,
    Description,
    LocalRef,
    Rows,
    Shard,
    concat_columns,
    gathers,
    index_groups,
    read_together,
)
from flowrl.data.batch.payload import ColumnError, Payload, Source, collect, copy_objects, merge

if TYPE_CHECKING:
    from tensordict import TensorDict


class TaskRunner(Protocol):
    """Runs pure functions on batches, on the task worker or locally."""

    def apply(self, fn: Callable, batch: "Batch", writes: tuple[str, ...], rows: str, kwargs: dict) -> "Batch":
        """Runs `fn(tensordict, **kwargs)` and returns the columns `writes`."""
        ...

    def reduce(self, fn: Callable, batch: "Batch", kwargs: dict) -> Any:  # Any: a Future of the function's result
        """Runs `fn(tensordict, **kwargs)` and returns a future of its result."""
        ...


class Batch:
    """A table of rows and named columns, stored as references. Only `get`, `tensordict` and `payload` fetch values."""

    def __init__(
        self, columns: Mapping[str, Column], num_rows: int | None = None, tasks: TaskRunner | None = None
    ) -> None:
        self._columns = dict(columns)
        self._num_rows = num_rows
        self._tasks = tasks
        self._sections = 1
        self._seed: tuple[int, ...] = ()

    # Constructors.

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> "Batch":
        """Creates a batch from one dictionary per row. All dictionaries must have the same keys."""
        names = list(rows[0]) if rows else []
        for position, row in enumerate(rows):
            if list(row) != names and set(row) != set(names):
                raise ColumnError(
                    f"row {position} has columns {', '.join(row)}, row 0 has {', '.join(names)}; give all rows the same"
                )
        return Batch.from_columns(rows={name: [row[name] for row in rows] for name in names}, num_rows=len(rows))

    @staticmethod
    def from_columns(
        rows: Mapping[str, Any] | None = None,
        tokens: Mapping[str, Any] | None = None,
        lengths: Sequence[int] | np.ndarray | None = None,
        num_rows: int | None = None,
    ) -> "Batch":
        """Creates a batch from row columns and flat token columns. `lengths` is the number of tokens of each row."""
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
            counts = {name: len(values) for name, values in flat.items()}
            raise ColumnError(
                f"token columns need lengths that sum to their tokens: lengths sum to {total}, tokens are {counts}"
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
        """Creates a batch from columns of a block. `index` selects rows of the block; None selects all rows."""
        known = all(shard.num_rows is not None for shard in block.shards)
        num_rows = len(index) if index is not None else block.num_rows if known else None
        return Batch({name: Column(block, index, name) for name in columns}, num_rows, tasks)

    # Properties.

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def num_rows(self) -> int:
        """Number of rows. Waits for the result of the method that returned the batch if the method declares
        `rows="unknown"`.
        """
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
        """Object that runs the functions of `apply` and `reduce`. If None, they run in this process."""
        return self._tasks

    @property
    def seed(self) -> tuple[int, ...]:
        """Seed of random choices in this batch, such as the order of `minibatches`. `Run` sets it to (seed, step)."""
        return self._seed or (0,)

    def column(self, name: str) -> Column:
        """Returns the block and the row index of a column. Raises `ColumnError` if the column is missing."""
        if name not in self._columns:
            raise ColumnError(f"the batch has no column {name!r}; it has {', '.join(self.columns) or 'none'}")
        return self._columns[name]

    def done(self) -> bool:
        return all(block.done() for block in {column.block for column in self._columns.values()})

    # Edits, which copy no values.

    def __getitem__(self, name: str) -> "Batch":
        return self.select(name)

    def __setitem__(self, name: str, value: "Batch") -> None:
        """Stores the single column of `value` under this name."""
        if not isinstance(value, Batch) or len(value.columns) != 1:
            actual = ", ".join(value.columns) if isinstance(value, Batch) else type(value).__name__
            raise ColumnError(f"batch[{name!r}] takes a batch of one column, not {actual}; use union for several")
        self._num_rows = self._check_rows(value, name)
        self._columns[name] = value._columns[value.columns[0]]
        self._tasks = self._tasks or value._tasks

    def select(self, *names: str) -> "Batch":
        """Returns a batch with these columns."""
        return self._with({name: self.column(name) for name in names}, self._num_rows)

    def drop(self, *names: str) -> "Batch":
        """Returns a batch without these columns."""
        return self.select(*(name for name in self._columns if name not in {self.column(n) and n for n in names}))

    def rename(self, names: Mapping[str, str]) -> "Batch":
        """Returns a batch with renamed columns. `names` maps old to new names."""
        for name in names:
            self.column(name)
        renamed = [names.get(name, name) for name in self._columns]
        if len(set(renamed)) < len(renamed):
            raise ColumnError(f"rename would give two columns one name: {', '.join(renamed)}")
        columns = {names.get(name, name): column for name, column in self._columns.items()}
        return self._with(columns, self._num_rows)

    def union(self, other: "Batch") -> "Batch":
        """Returns a batch with the columns of both batches. Columns of `other` replace columns of the same name."""
        num_rows = self._check_rows(other, ", ".join(other.columns))
        merged = Batch(self._columns | other._columns, num_rows, self._tasks or other._tasks)
        return merged.with_sections(max(self._sections, other._sections)).with_seed(self._seed or other._seed)

    def _with(self, columns: Mapping[str, Column], num_rows: int | None) -> "Batch":
        return Batch(columns, num_rows, self._tasks).with_sections(self._sections).with_seed(self._seed)

    def _check_rows(self, other: "Batch", what: str) -> int | None:
        """Returns the number of rows of both batches, or None if it is unknown. Raises `ColumnError` if the batches
        have different numbers of rows.
        """
        if not self._columns:
            return other._num_rows
        known = self._num_rows is not None and other._num_rows is not None
        if known and self._num_rows != other._num_rows:
            raise ColumnError(
                f"{what} has {other._num_rows} rows, the batch has {self._num_rows}; they must describe the same rows"
            )
        return other._num_rows if self._num_rows is None else self._num_rows

    def rows(self, rows: slice | Sequence[int] | np.ndarray) -> "Batch":
        """Returns the rows selected by a slice, by positions or by a boolean mask."""
        if isinstance(rows, slice):
            positions = np.arange(*rows.indices(self.num_rows))
        else:
            positions = np.asarray(rows)
            if positions.dtype == bool:
                if len(positions) != self.num_rows:
                    raise ColumnError(
                        f"a mask of {len(positions)} rows cannot select from {self.num_rows} rows; use a value per row"
                    )
                positions = np.flatnonzero(positions)
            positions = positions.astype(np.int64)
        if len(positions) and (positions.min() < 0 or positions.max() >= self.num_rows):
            raise ColumnError(
                f"rows {positions.min()} to {positions.max()} are out of range; the batch has 0 to {self.num_rows - 1}"
            )
        return self._take(positions)

    def _take(self, positions: np.ndarray) -> "Batch":
        composed: dict[int | None, np.ndarray] = {}
        columns = {}
        for name, column in self._columns.items():
            key = None if column.index is None else id(column.index)
            if key not in composed:
                composed[key] = positions if column.index is None else column.index[positions]
            columns[name] = Column(column.block, composed[key], column.source)
        return Batch(columns, len(positions), self._tasks).with_seed(self._seed)

    def reorder(self, order: Sequence[int] | np.ndarray) -> "Batch":
        """Returns the rows in a new order. `order` is a permutation of all row positions."""
        positions = np.asarray(order, dtype=np.int64)
        if not _is_permutation(positions, self.num_rows):
            raise ColumnError(f"order must be a permutation of 0 to {self.num_rows - 1}; use rows() to select rows")
        return self._take(positions)

    def repeat(self, times: int, *, interleave: bool = True) -> "Batch":
        """Repeats the rows. For rows 0 and 1, the order is 0 0 1 1 with `interleave`, and 0 1 0 1 without."""
        positions = np.arange(self.num_rows)
        return self._take(np.repeat(positions, times) if interleave else np.tile(positions, times))

    def with_samples(self, count: int) -> "Batch":
        """Returns `count` adjacent copies of each row, numbered from 0 in the row column `sample`."""
        batch = self.repeat(count)
        batch["sample"] = Batch.from_columns({"sample": np.tile(np.arange(count), self.num_rows)})
        return batch

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Concatenates the rows of batches with the same columns."""
        if not batches:
            raise ColumnError("concat needs at least one batch")
        names = batches[0].columns
        for batch in batches:
            if set(batch.columns) != set(names):
                raise ColumnError(f"concat needs batches with equal columns, not {names} and {batch.columns}")
        columns = concat_columns(names, [batch._columns for batch in batches])
        tasks = next((batch.tasks for batch in batches if batch.tasks), None)
        return Batch(columns, sum(batch.num_rows for batch in batches), tasks).with_seed(batches[0]._seed)

    def minibatches(
        self, rows: int, *, epochs: int = 1, seed: int | Sequence[int] | None = None, groups: str | None = None
    ) -> Iterator["Batch"]:
        """Yields mini-batches of `rows` rows. Each epoch contains every row once, in a new random order.

        The order depends only on `seed` and the epoch. The last mini-batch of an epoch may have fewer rows.

        Args:
            rows: number of rows of a mini-batch, >= 1.
            epochs: number of passes over the rows.
            seed: seed of the order. If None, the seed of the batch is used.
            groups: row column of integers. Rows with the same value, such as a pair, stay in one mini-batch, in their
                order. The driver waits for the column. A mini-batch has fewer rows if the next group does not fit, and
                more rows if a single group has more.
        """
        if rows < 1:
            raise ValueError(f"a minibatch has {rows} rows; use at least 1")
        seed = self.seed if seed is None else seed
        if groups is not None:
            yield from self._grouped_minibatches(rows, epochs, seed, groups)
            return
        for epoch in range(epochs):
            generator = np.random.default_rng([*np.atleast_1d(seed), epoch])
            order = _shuffle(generator, self.num_rows, rows, self._sections)
            for start in range(0, self.num_rows, rows):
                yield self._take(order[start : start + rows]).with_sections(self._sections)

    def _grouped_minibatches(self, rows: int, epochs: int, seed: int | Sequence[int], groups: str) -> Iterator["Batch"]:
        if self._sections > 1:
            raise UserError(
                f"minibatches of groups ({groups}) are not supported with placement.routes, which fixes the rank of "
                f"each row: remove placement.routes"
            )
        index_N, num_groups = index_groups(self.group_ids(groups))
        members = np.split(np.argsort(index_N, kind="stable"), np.cumsum(np.bincount(index_N))[:-1])
        for epoch in range(epochs):
            part: list[np.ndarray] = []
            num_rows = 0
            for group in np.random.default_rng([*np.atleast_1d(seed), epoch]).permutation(num_groups):
                if part and num_rows + len(members[group]) > rows:
                    yield self._take(np.concatenate(part))
                    part, num_rows = [], 0
                part.append(members[group])
                num_rows += len(members[group])
            if part:
                yield self._take(np.concatenate(part))

    def group_ids(self, name: str) -> np.ndarray:
        """Waits for a row column of integers and returns its values, which identify the group of each row."""
        ids = self.payload(name).rows.get(name)
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iub":
            raise ColumnError(f"the column {name!r} of groups must be a row column of integers")
        return ids

    @property
    def num_sections(self) -> int:
        return self._sections

    def with_sections(self, count: int) -> "Batch":
        """Divides the rows into `count` equal consecutive sections, one per data-parallel rank, for `minibatches`.

        Each mini-batch then has the same number of rows from each section, so that a row stays on the same rank. A
        batch with selected or reordered rows has no sections.
        """
        result = Batch(self._columns, self._num_rows, self._tasks)
        result._sections, result._seed = count, self._seed
        return result

    def with_seed(self, seed: Sequence[int]) -> "Batch":
        """Returns the batch with another seed. Batches derived from it keep the seed."""
        result = Batch(self._columns, self._num_rows, self._tasks)
        result._sections, result._seed = self._sections, tuple(seed)
        return result

    def with_tasks(self, tasks: TaskRunner | None) -> "Batch":
        """Returns the batch with another object that runs the functions of `apply` and `reduce`."""
        result = Batch(self._columns, self._num_rows, tasks)
        result._sections, result._seed = self._sections, self._seed
        return result

    # Values.

    def payload(self, *names: str) -> Payload:
        """Waits for these columns (by default, all columns) and returns their values as NumPy arrays."""
        return assemble(self, names or self.columns, (0, self.num_rows))

    def tensordict(self, *names: str) -> "TensorDict":
        """Waits for these columns (by default, all columns) and returns their values as a TensorDict."""
        from flowrl.data.batch.tensordicts import to_tensordict  # noqa: PLC0415 (a driver that reads no values needs no torch)

        return to_tensordict(self.payload(*names), copy=True)

    def get(self, name: str) -> Any:  # Any: a tensor or a list, depending on the column's kind
        """Waits for a column and returns a tensor `[B, ...]` or `[T, ...]`, or a list of B objects.

        The column `length` is the number of tokens per row `[B]`. If the call that computes the column failed, raises
        its error.
        """
        if name == "length" and name not in self._columns:
            import torch  # noqa: PLC0415 (see tensordict)

            return torch.from_numpy(self.lengths().copy())
        payload = self.payload(name)
        column = payload.rows.get(name)
        if isinstance(column, list):
            return copy_objects(column)
        from flowrl.data.batch.tensordicts import to_tensordict  # noqa: PLC0415 (see tensordict)

        return to_tensordict(payload, copy=True)["tokens" if name in payload.tokens else "rows", name]

    def lengths(self) -> np.ndarray:
        """Waits for the row lengths and returns the number of tokens per row `[B]`."""
        for column in self._columns.values():
            if column.block.kind(column.source) == "token":
                lengths = column.block.lengths()
                assert lengths is not None
                return lengths if column.index is None else lengths[column.index]
        raise ColumnError(
            f"the batch has no token column, so its rows have no length; it has {', '.join(self.columns)}"
        )

    def apply(
        self, fn: Callable, reads: Sequence[str], writes: Sequence[str], *, rows: str = "same", **kwargs: Any
    ) -> "Batch":
        """Runs `fn(tensordict, **kwargs) -> tensordict` on all rows, on the task worker. Does not wait for the result.

        Returns this batch with the additional columns `writes`. With `rows="unknown"`, the function may add or remove
        rows, and the returned batch has only the columns `writes`.
        """
        read = self.select(*reads)
        result = (self._tasks or LocalTasks()).apply(fn, read, tuple(writes), rows, kwargs)
        return self.union(result) if rows == "same" else result

    def reduce(
        self, fn: Callable, reads: Sequence[str], **kwargs: Any
    ) -> Any:  # Any: a Future of the function's result
        """Runs `fn(tensordict, **kwargs)` on the task worker and returns a future of its result."""
        return (self._tasks or LocalTasks()).reduce(fn, self.select(*reads), kwargs)


class LocalTasks:
    """Runs the functions of `apply` and `reduce` in this process."""

    def apply(self, fn: Callable, batch: Batch, writes: tuple[str, ...], rows: str, kwargs: dict) -> Batch:
        from flowrl.data.batch.tensordicts import from_tensordict  # noqa: PLC0415 (see Batch.tensordict)

        payload = batch.payload()
        result = from_tensordict(fn(batch.tensordict(), **_resolve_refs(kwargs)), payload.lengths)
        if set(result.columns) != set(writes):
            raise ColumnError(
                f"{fn.__name__} returned {', '.join(result.columns)} instead of the declared {', '.join(writes)}"
            )
        return Batch.of_payload(result)

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict) -> LocalRef:
        return LocalRef(fn(batch.tensordict(), **_resolve_refs(kwargs)))


def _resolve_refs(kwargs: dict) -> dict:
    return {name: value.get() if isinstance(value, LocalRef) else value for name, value in kwargs.items()}


def assemble(batch: Batch, names: Sequence[str], rows: Rows) -> Payload:
    """Fetches the values of some rows and columns to this process."""
    plans = list(gathers({name: batch.column(name) for name in names}, rows))
    shards = [block.shards[piece.shard] for block, _, plan in plans for piece in plan.pieces]
    payloads = iter(read_together([shard.payload for shard in shards]))
    parts = []
    for block, columns, plan in plans:
        named = [(piece, block.shards[piece.shard].sources(columns)) for piece in plan.pieces]
        sources = [Source(next(payloads), own, piece.rows, piece.targets) for piece, own in named]
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
    """Returns a 64-bit array if all values are numbers of the same type, otherwise a list of objects.

    Mixed types are not promoted, because the dtype of a value must not depend on other rows.
    """
    if hasattr(values, "numpy") or isinstance(values, np.ndarray):
        array = np.asarray(values).copy(order="C")
        return array if array.dtype.kind in "biufc" else array.tolist()
    listed = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = {type(value) for value in listed}
    fits = kinds != {int} or max(map(abs, listed)) < 2**63
    return np.array(listed) if len(kinds) == 1 and kinds < {bool, int, float} and fits else listed


def _shuffle(generator: np.random.Generator, num_rows: int, rows: int, sections: int) -> np.ndarray:
    """Returns a random order of all rows. Each mini-batch of `rows` rows has the same number of rows from each section.

    Raises `UserError` if the number of sections does not divide `num_rows` and `rows`.
    """
    if sections == 1:
        return generator.permutation(num_rows)
    if num_rows % sections or rows % sections:
        raise UserError(
            f"minibatches of {rows} rows cannot be split evenly over the {sections} data-parallel ranks of "
            f"placement.routes (the batch has {num_rows} rows): use multiples of {sections}, or remove placement.routes"
        )
    size, part = num_rows // sections, rows // sections
    order = np.stack([generator.permutation(size) + size * section for section in range(sections)])
    return np.concatenate([order[:, start : start + part].ravel() for start in range(0, size, part)])
