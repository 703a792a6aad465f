"""Payload: the stored values of rows, as NumPy arrays and lists. Processes on the same node read arrays without copies.

A payload has row columns `[B, ...]` and flat token columns `[T, ...]`. `lengths` `[B]` is the number of tokens per row.
NumPy has no bfloat16. Columns of dtype bfloat16 are therefore stored as int16, and `bfloat16` lists their names.
"""

import copy
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from flowrl.config.user_errors import UserError

OBJECT_BYTES = 64
"""Assumed size of a Python object in bytes."""

LONG_RUN_BYTES = 512
"""Average size in bytes of runs of rows above which each run is copied as a slice. Shorter runs are copied with index
arrays.
"""

RowSelection = slice | np.ndarray | None
"""Rows of a payload; None means all rows."""


class ColumnError(UserError):
    """Raised if a column is missing, or if columns of one batch have different numbers of rows."""


Value = TypeVar("Value")


def copy_objects(value: Value) -> Value:
    """Returns a deep copy. Uses pickle, which copies lists, dictionaries and text several times faster than
    `copy.deepcopy`, and `copy.deepcopy` for values that cannot be pickled.
    """
    try:
        return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, ImportError, TypeError):
        return copy.deepcopy(value)


@dataclass(frozen=True)
class Payload:
    """The values of a table of rows and named columns. A payload must not be modified."""

    num_rows: int
    rows: dict[str, np.ndarray | list] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: np.ndarray | None = None
    bfloat16: frozenset[str] = frozenset()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.rows, *self.tokens)

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes, with `OBJECT_BYTES` per object."""
        arrays = [*self.rows.values(), *self.tokens.values()]
        return sum(_bytes_each(column) * len(column) for column in arrays)

    def copy(self) -> "Payload":
        rows = {name: copy_objects(c) for name, c in self.rows.items()}
        tokens = {name: c.copy() for name, c in self.tokens.items()}
        return Payload(
            self.num_rows, rows, tokens, None if self.lengths is None else self.lengths.copy(), self.bfloat16
        )

    def with_own_objects(self) -> "Payload":
        """Returns a copy that shares the arrays and copies the Python objects."""
        rows = {name: c if isinstance(c, np.ndarray) else copy_objects(c) for name, c in self.rows.items()}
        return replace(self, rows=rows)

    def take(self, rows: RowSelection, columns: Mapping[str, str]) -> "Payload":
        """Returns rows of some columns: views for a slice, and copies for an array. `columns` maps new names to current
        names.
        """
        if isinstance(rows, np.ndarray):
            return collect(len(rows), [Source(self, columns, rows)])
        row_names, token_names = self.kinds(columns)
        span = _range(rows, self.num_rows)
        selected = slice(span.start, span.stop)
        row_columns = {name: self.rows[s][selected] for name, s in row_names.items()}
        if not token_names:
            return Payload(len(span), row_columns, {}, None, self.bfloat16_names(columns))
        assert self.lengths is not None
        lengths = self.lengths[selected]
        first = int(self.lengths[: span.start].sum())
        selected_tokens = slice(first, first + int(lengths.sum()))
        tokens = {name: self.tokens[s][selected_tokens] for name, s in token_names.items()}
        return Payload(len(span), row_columns, tokens, lengths, self.bfloat16_names(columns))

    def nbytes_of(self, rows: RowSelection, columns: Mapping[str, str]) -> int:
        """Returns `take(rows, columns).nbytes` without copying values."""
        row_names, token_names = self.kinds(columns)
        count = len(rows) if isinstance(rows, np.ndarray) else len(_range(rows, self.num_rows))
        size = count * sum(_bytes_each(self.rows[source]) for source in row_names.values())
        if not token_names:
            return size
        assert self.lengths is not None
        lengths = self.lengths if rows is None else self.lengths[rows]
        return size + int(lengths.sum()) * sum(_bytes_each(self.tokens[source]) for source in token_names.values())

    def kinds(self, columns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Splits `columns` into row columns and token columns. Raises `ColumnError` if a column is missing."""
        for source in columns.values():
            if source not in self.rows and source not in self.tokens:
                raise ColumnError(
                    f"column {source!r} is not in this payload; it has {', '.join(self.columns) or 'none'}"
                )
        row_names = {name: source for name, source in columns.items() if source in self.rows}
        return row_names, {name: source for name, source in columns.items() if source not in self.rows}

    def bfloat16_names(self, columns: Mapping[str, str]) -> frozenset[str]:
        """Returns the new names of all bfloat16 columns in `columns`, which maps new names to current names."""
        return frozenset(name for name, source in columns.items() if source in self.bfloat16)


@dataclass(frozen=True)
class Runs:
    """Runs (ranges of consecutive rows or tokens) to copy.

    Run i copies `counts[i]` elements, from index `sources[i]` on, to index `targets[i]` and the following indices.
    """

    sources: np.ndarray
    targets: np.ndarray
    counts: np.ndarray

    @staticmethod
    def one(source: int, target: int, count: int) -> "Runs":
        return Runs(np.array([source]), np.array([target]), np.array([count]))

    @staticmethod
    def of(sources: np.ndarray, targets: np.ndarray) -> "Runs":
        """Returns the runs that copy the element at index `sources[i]` to index `targets[i]`, for all i.

        A run merges elements whose indices are consecutive in both arrays.
        """
        if not len(sources):
            return Runs(sources, targets, np.zeros(0, dtype=np.int64))
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        starts = np.concatenate([[0], breaks])
        return Runs(sources[starts], targets[starts], np.diff(starts, append=len(sources)))

    def of_tokens(self, source_offsets: np.ndarray, target_offsets: np.ndarray) -> "Runs":
        """Converts runs of rows to runs of tokens, given the token offsets of source and target rows."""
        starts = source_offsets[self.sources]
        counts = source_offsets[self.sources + self.counts] - starts
        return Runs(starts, target_offsets[self.targets], counts)

    def copy(self, column: np.ndarray, out: np.ndarray) -> None:
        is_long = int(self.counts.sum()) * bytes_each(column) >= LONG_RUN_BYTES * len(self.counts)
        if len(self.counts) == 1 or is_long:
            for source, target, count in self._iterate():
                out[target : target + count] = column[source : source + count]
            return
        sources, targets = self._elements
        if isinstance(targets, slice) and column.dtype == out.dtype:
            # In other modes, NumPy copies to a temporary buffer first.
            np.take(column, sources, axis=0, out=out[targets], mode="clip")
        else:
            out[targets] = column[sources]

    def _iterate(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.sources.tolist(), self.targets.tolist(), self.counts.tolist(), strict=True)

    @cached_property
    def _elements(self) -> tuple[np.ndarray, np.ndarray | slice]:
        ends = np.cumsum(self.counts)
        total = int(ends[-1]) if len(ends) else 0
        within = np.arange(total) - np.repeat(ends - self.counts, self.counts)
        sources = np.repeat(self.sources, self.counts) + within
        if total and np.array_equal(self.targets - self.targets[0], ends - self.counts):
            return sources, slice(int(self.targets[0]), int(self.targets[0]) + total)
        return sources, np.repeat(self.targets, self.counts) + within

    def copy_objects(self, values: list | np.ndarray, out: list) -> None:
        for source, target, count in self._iterate():
            out[target : target + count] = values[source : source + count]


def bytes_each(column: np.ndarray) -> int:
    return column.itemsize * math.prod(column.shape[1:])


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns the index of the first token of each row, followed by the total number of tokens: `[B + 1]`."""
    return np.concatenate([[0], np.cumsum(lengths)])


def common_dtype(columns: Iterable[np.ndarray]) -> np.dtype:
    dtypes = {column.dtype for column in columns}
    return dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)


@dataclass(frozen=True)
class Source:
    """Rows of a payload that `collect` copies into a new payload."""

    payload: Payload
    columns: Mapping[str, str]
    """Column name in the new payload -> column name in this payload."""
    rows: RowSelection = None
    targets: RowSelection = None
    """Row positions in the new payload; None means all rows."""

    @property
    def num_rows(self) -> int:
        if isinstance(self.rows, np.ndarray):
            return len(self.rows)
        return len(_range(self.rows, self.payload.num_rows))

    def row_column(self, name: str) -> np.ndarray | list:
        return self._column(name, self.payload.rows, "a value per token")

    def token_column(self, name: str) -> np.ndarray | list:
        return self._column(name, self.payload.tokens, "a value per row")

    def _column(self, name: str, kind: Mapping[str, Any], other: str) -> np.ndarray | list:
        source = self.columns[name]
        if source in kind:
            return kind[source]
        self.payload.kinds({name: source})
        raise ColumnError(f"column {name!r} has {other} in some shards only; rename one of the two columns")

    def runs(self, num_rows: int) -> Runs:
        if isinstance(self.rows, np.ndarray) or isinstance(self.targets, np.ndarray):
            return Runs.of(_positions(self.rows, self.payload.num_rows), _positions(self.targets, num_rows))
        return Runs.one(
            _range(self.rows, self.payload.num_rows).start, _range(self.targets, num_rows).start, self.num_rows
        )


def collect(num_rows: int, sources: Sequence[Source]) -> Payload:
    """Returns a new payload with rows of several payloads. Returns views if there is one source with consecutive rows.

    Raises `ColumnError` if the sources have different kinds, types or shapes of a column.
    """
    # The kind of an empty column is unknown, so sources without rows are skipped.
    sources = [source for source in sources if source.num_rows] or sources[:1]
    first = sources[0]
    if len(sources) == 1 and not isinstance(first.rows, np.ndarray) and not isinstance(first.targets, np.ndarray):
        return first.payload.take(first.rows, first.columns)
    bfloat16 = _common_bfloat16(sources)
    runs = [source.runs(num_rows) for source in sources]
    row_names, token_names = first.payload.kinds(first.columns)
    rows = {name: _assemble_column(name, num_rows, [s.row_column(name) for s in sources], runs) for name in row_names}
    if not token_names:
        return Payload(num_rows, rows, {}, None, bfloat16)
    columns = {name: [source.token_column(name) for source in sources] for name in token_names}
    source_lengths = [source.payload.lengths for source in sources if source.payload.lengths is not None]
    lengths = _assemble_column("length", num_rows, source_lengths, runs)
    assert isinstance(lengths, np.ndarray) and len(source_lengths) == len(sources)
    ends = offsets(lengths)
    runs = [run.of_tokens(offsets(own), ends) for run, own in zip(runs, source_lengths, strict=True)]
    tokens = {name: _assemble_column(name, int(ends[-1]), parts, runs) for name, parts in columns.items()}
    return Payload(num_rows, rows, tokens, lengths, bfloat16)


def _common_bfloat16(sources: Sequence[Source]) -> frozenset[str]:
    names = [source.payload.bfloat16_names(source.columns) for source in sources]
    mixed = frozenset().union(*(own ^ names[0] for own in names))
    if mixed:
        raise ColumnError(
            f"column {', '.join(sorted(mixed))} is bfloat16 in some shards only; give it one dtype on every rank"
        )
    return names[0]


def _assemble_column(name: str, size: int, columns: Sequence, runs: Sequence[Runs]) -> Any:  # Any: an array or a list
    """Copies runs of several columns to a new column. The result is a list if a source is a list, otherwise an
    array.
    """
    if not all(isinstance(column, np.ndarray) for column in columns):
        values = [None] * size
        for column, run in zip(columns, runs, strict=True):
            run.copy_objects(column, values)
        return values
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise ColumnError(f"column {name} has values of the shapes {listed}; give it one shape on every rank")
    out = np.empty((size, *shapes.pop()), common_dtype(columns))
    for column, run in zip(columns, runs, strict=True):
        run.copy(column, out)
    return out


def _bytes_each(column: np.ndarray | list) -> int:
    return bytes_each(column) if isinstance(column, np.ndarray) else OBJECT_BYTES


def _range(rows: slice | None, num_rows: int) -> range:
    return range(num_rows) if rows is None else range(*rows.indices(num_rows))


def _positions(rows: RowSelection, num_rows: int) -> np.ndarray:
    if isinstance(rows, np.ndarray):
        return rows
    spanned = _range(rows, num_rows)
    return np.arange(spanned.start, spanned.stop)


def merge(parts: Sequence[Payload]) -> Payload:
    """Returns a payload with the columns of several payloads. Raises `ColumnError` if their rows or lengths differ."""
    if len(parts) == 1:
        return parts[0]
    rows: dict[str, np.ndarray | list] = {}
    tokens: dict[str, np.ndarray] = {}
    lengths: np.ndarray | None = None
    for part in parts:
        if part.num_rows != parts[0].num_rows:
            raise ColumnError(
                f"columns {', '.join(parts[0].columns)} have {parts[0].num_rows} rows, but "
                f"{', '.join(part.columns)} have {part.num_rows}; columns of one batch describe the same rows"
            )
        if part.lengths is not None and lengths is not None and not np.array_equal(part.lengths, lengths):
            raise ColumnError(
                f"token columns {', '.join(tokens)} and {', '.join(part.tokens)} differ in the lengths of rows; "
                f"token columns of one batch are aligned with input_ids"
            )
        lengths = part.lengths if lengths is None else lengths
        rows.update(part.rows)
        tokens.update(part.tokens)
    bfloat16 = frozenset().union(*(part.bfloat16 for part in parts))
    return Payload(parts[0].num_rows, rows, tokens, lengths, bfloat16)
