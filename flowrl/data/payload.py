"""The stored form of rows: NumPy arrays and lists, which every Ray cluster reads without a copy.

A payload holds row columns `[B, ...]` and token columns `[T, ...]`. All its token columns share one `lengths` `[B]`
with sum T. bfloat16 has no NumPy type: such a column is kept as an int16 view and named in `bfloat16`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowrl.config.errors import UserError

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
        """Bytes of the arrays; an object counts as 64."""
        arrays = [*self.rows.values(), *self.tokens.values()]
        return sum(a.nbytes if isinstance(a, np.ndarray) else 64 * len(a) for a in arrays)

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

        A slice gives views; an index array copies. Lengths come along when a token column does.
        """
        for source in columns.values():
            if source not in self.rows and source not in self.tokens:
                raise ColumnError(
                    f"column {source!r} is not in this payload; it has {', '.join(self.columns) or 'none'}"
                )
        row_columns = {name: _take_rows(self.rows[s], rows) for name, s in columns.items() if s in self.rows}
        token_names = {name: s for name, s in columns.items() if s in self.tokens}
        bfloat16 = frozenset(name for name, s in columns.items() if s in self.bfloat16)
        count = _count(self.num_rows, rows)
        if not token_names:
            return Payload(count, row_columns, {}, None, bfloat16)
        assert self.lengths is not None
        lengths, positions = _token_positions(self.lengths, rows)
        tokens = {name: self.tokens[s][positions] for name, s in token_names.items()}
        return Payload(count, row_columns, tokens, lengths, bfloat16)


def _count(num_rows: int, rows: RowSelection) -> int:
    if rows is None:
        return num_rows
    return len(range(*rows.indices(num_rows))) if isinstance(rows, slice) else len(rows)


def _take_rows(column: np.ndarray | list, rows: RowSelection) -> np.ndarray | list:
    if rows is None:
        return column
    if isinstance(column, np.ndarray) or isinstance(rows, slice):
        return column[rows]
    return [column[i] for i in rows]


def _token_positions(lengths: np.ndarray, rows: RowSelection) -> tuple[np.ndarray, slice | np.ndarray]:
    """The selected rows' lengths, and where their tokens stand in a flat token column."""
    if rows is None:
        return lengths, slice(None)
    ends = np.cumsum(lengths)
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(len(lengths))
        first = int(ends[start - 1]) if start else 0
        last = int(ends[stop - 1]) if stop else 0
        return lengths[rows], slice(first, max(first, last))
    taken = lengths[rows]
    starts = ends[rows] - taken
    before = np.cumsum(taken) - taken
    return taken, np.repeat(starts - before, taken) + np.arange(int(taken.sum()))


def concat(parts: Sequence[Payload]) -> Payload:
    """Stacks payloads of the same columns, rows in the order given.

    Parts without rows are left out: an empty object column cannot know that it is one.
    """
    parts = [part for part in parts if part.num_rows] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    mixed = set().union(*(part.bfloat16 ^ first.bfloat16 for part in parts))
    if mixed:
        raise ColumnError(
            f"column {', '.join(sorted(mixed))} is bfloat16 in some shards only; give it one dtype on every rank"
        )
    rows: dict[str, np.ndarray | list] = {}
    for name in first.rows:
        pieces = [part.rows[name] for part in parts]
        if all(isinstance(piece, np.ndarray) for piece in pieces):
            rows[name] = np.concatenate(pieces)
        else:
            rows[name] = [value for piece in pieces for value in piece]
    tokens = {name: np.concatenate([part.tokens[name] for part in parts]) for name in first.tokens}
    lengths = None if first.lengths is None else np.concatenate([p.lengths for p in parts if p.lengths is not None])
    return Payload(sum(part.num_rows for part in parts), rows, tokens, lengths, first.bfloat16)


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
