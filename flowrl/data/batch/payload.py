"""The stored form of rows: NumPy arrays and lists, which every Ray cluster reads without a copy.

A payload holds row columns `[B, ...]` and token columns `[T, ...]`. All its token columns share one `lengths` `[B]`
with sum T. bfloat16 has no NumPy type: such a column is kept as an int16 view and named in `bfloat16`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.config.user_errors import UserError
from flowrl.data.batch.row_runs import Runs, bytes_each, offsets, one_dtype

OBJECT_BYTES = 64
"""What an object counts as where sizes are compared."""

RowSelection = slice | np.ndarray | None
"""Rows of one payload: None is all of them in order."""


class ColumnError(UserError):
    """A column is missing, or two columns that should describe the same rows do not."""


@dataclass(frozen=True)
class Payload:
    """Rows x named columns, as values. Nobody changes one after it was made."""

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
        """Bytes of the arrays; an object counts as `OBJECT_BYTES`."""
        arrays = [*self.rows.values(), *self.tokens.values()]
        return sum(_bytes_each(column) * len(column) for column in arrays)

    def copy(self) -> "Payload":
        """The same values in memory of their own."""
        rows = {name: copy.deepcopy(c) for name, c in self.rows.items()}
        tokens = {name: c.copy() for name, c in self.tokens.items()}
        return Payload(
            self.num_rows, rows, tokens, None if self.lengths is None else self.lengths.copy(), self.bfloat16
        )

    def with_own_objects(self) -> "Payload":
        """The same arrays beside copies of the objects."""
        rows = {name: c if isinstance(c, np.ndarray) else copy.deepcopy(c) for name, c in self.rows.items()}
        return replace(self, rows=rows)

    def take(self, rows: RowSelection, columns: Mapping[str, str]) -> "Payload":
        """The selected rows of some columns, renamed: `columns` maps the new name to the name here.

        A slice gives views; positions copy. Lengths come along when a token column does.
        """
        if isinstance(rows, np.ndarray):
            return collect(len(rows), [Source(self, columns, rows)])
        row_names, token_names = self.kinds(columns)
        span = _range(rows, self.num_rows)
        whole = slice(span.start, span.stop)
        row_columns = {name: self.rows[s][whole] for name, s in row_names.items()}
        if not token_names:
            return Payload(len(span), row_columns, {}, None, self.marks(columns))
        assert self.lengths is not None
        lengths = self.lengths[whole]
        first = int(self.lengths[: span.start].sum())
        stretch = slice(first, first + int(lengths.sum()))
        taken = {name: self.tokens[s][stretch] for name, s in token_names.items()}
        return Payload(len(span), row_columns, taken, lengths, self.marks(columns))

    def nbytes_of(self, rows: RowSelection, columns: Mapping[str, str]) -> int:
        """What `nbytes` would be of `take(rows, columns)`, without taking them."""
        row_names, token_names = self.kinds(columns)
        count = len(rows) if isinstance(rows, np.ndarray) else len(_range(rows, self.num_rows))
        size = count * sum(_bytes_each(self.rows[source]) for source in row_names.values())
        if not token_names:
            return size
        assert self.lengths is not None
        lengths = self.lengths if rows is None else self.lengths[rows]
        return size + int(lengths.sum()) * sum(_bytes_each(self.tokens[source]) for source in token_names.values())

    def kinds(self, columns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """The row columns among these, and the token columns. Raises `ColumnError` if one is neither."""
        for source in columns.values():
            if source not in self.rows and source not in self.tokens:
                raise ColumnError(
                    f"column {source!r} is not in this payload; it has {', '.join(self.columns) or 'none'}"
                )
        row_names = {name: source for name, source in columns.items() if source in self.rows}
        return row_names, {name: source for name, source in columns.items() if source not in self.rows}

    def marks(self, columns: Mapping[str, str]) -> frozenset[str]:
        """The names under which bfloat16 columns go."""
        return frozenset(name for name, source in columns.items() if source in self.bfloat16)


@dataclass(frozen=True)
class Source:
    """Rows of a payload on their way into another."""

    payload: Payload
    columns: Mapping[str, str]
    """New name -> name in the payload."""
    rows: RowSelection = None
    at: RowSelection = None
    """Which rows of the other they become; None: all."""

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
        """Which runs of the payload's rows go where among `num_rows`."""
        if isinstance(self.rows, np.ndarray) or isinstance(self.at, np.ndarray):
            return Runs.of(_positions(self.rows, self.payload.num_rows), _positions(self.at, num_rows))
        return Runs.one(_range(self.rows, self.payload.num_rows).start, _range(self.at, num_rows).start, self.num_rows)


def collect(num_rows: int, sources: Sequence[Source]) -> Payload:
    """Builds rows out of those of several payloads, every column with one copy straight to its place.

    Consecutive rows of a single source are views. Sources without rows are left out: an empty object column cannot know
    that it is one.

    Raises `ColumnError` if a column has another kind, type or shape in some of the sources.
    """
    sources = [source for source in sources if source.num_rows] or sources[:1]
    first = sources[0]
    if len(sources) == 1 and not isinstance(first.rows, np.ndarray) and not isinstance(first.at, np.ndarray):
        return first.payload.take(first.rows, first.columns)
    bfloat16 = _one_mark(sources)
    runs = [source.runs(num_rows) for source in sources]
    row_names, token_names = first.payload.kinds(first.columns)
    rows = {name: _filled(name, num_rows, [s.row_column(name) for s in sources], runs) for name in row_names}
    if not token_names:
        return Payload(num_rows, rows, {}, None, bfloat16)
    columns = {name: [source.token_column(name) for source in sources] for name in token_names}
    held = [source.payload.lengths for source in sources if source.payload.lengths is not None]
    lengths = _filled("length", num_rows, held, runs)
    assert isinstance(lengths, np.ndarray) and len(held) == len(sources)
    ends = offsets(lengths)
    runs = [part.of_tokens(offsets(taken), ends) for part, taken in zip(runs, held, strict=True)]
    tokens = {name: _filled(name, int(ends[-1]), parts, runs) for name, parts in columns.items()}
    return Payload(num_rows, rows, tokens, lengths, bfloat16)


def _one_mark(sources: Sequence[Source]) -> frozenset[str]:
    marks = [source.payload.marks(source.columns) for source in sources]
    mixed = frozenset().union(*(mark ^ marks[0] for mark in marks))
    if mixed:
        raise ColumnError(
            f"column {', '.join(sorted(mixed))} is bfloat16 in some shards only; give it one dtype on every rank"
        )
    return marks[0]


def _filled(name: str, size: int, columns: Sequence, runs: Sequence[Runs]) -> Any:  # Any: an array or a list
    """One column out of the runs of several: an array, or a list where one of them is a list."""
    if not all(isinstance(column, np.ndarray) for column in columns):
        values = [None] * size
        for column, part in zip(columns, runs, strict=True):
            part.copy_objects(column, values)
        return values
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise ColumnError(f"column {name} has values of the shapes {found}; give it one shape on every rank")
    out = np.empty((size, *shapes.pop()), one_dtype(columns))
    for column, part in zip(columns, runs, strict=True):
        part.copy(column, out)
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
    """Puts the columns of payloads that hold the same rows beside each other.

    Raises `ColumnError` if they differ in the number of rows, or their token columns in the lengths of the rows.
    """
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
