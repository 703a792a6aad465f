"""The oracle: a batch is a list of rows, an edit is a loop over rows, and a call is a function of each row.

It knows nothing of shards, references, indices or ranks. Whatever chain of edits and calls is made on it and on the
real thing, the same rows have to come out in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
"""Column -> value; a token column's value is the list of the row's tokens."""


@dataclass(frozen=True)
class Rows:
    """The `Batch` of the oracle: a list of rows."""

    rows: tuple[Row, ...]

    @property
    def columns(self) -> set[str]:
        return set(self.rows[0]) if self.rows else set()

    def select(self, names: Sequence[str]) -> "Rows":
        return Rows(tuple({name: row[name] for name in names} for row in self.rows))

    def rename(self, names: dict[str, str]) -> "Rows":
        return Rows(tuple({names.get(name, name): value for name, value in row.items()} for row in self.rows))

    def take(self, positions: Sequence[int]) -> "Rows":
        return Rows(tuple(dict(self.rows[position]) for position in positions))

    def repeat(self, times: int, *, interleave: bool) -> "Rows":
        if interleave:
            return Rows(tuple(dict(row) for row in self.rows for _ in range(times)))
        return Rows(tuple(dict(row) for _ in range(times) for row in self.rows))

    def union(self, other: "Rows") -> "Rows":
        return Rows(tuple(mine | theirs for mine, theirs in zip(self.rows, other.rows, strict=True)))

    def call(self, method: Callable[[Row], list[Row]]) -> "Rows":
        """Applies a function to each row, and returns all results in order."""
        return Rows(tuple(result for row in self.rows for result in method(row)))


def concat(parts: Sequence[Rows]) -> Rows:
    return Rows(tuple(dict(row) for part in parts for row in part.rows))


def weigh(row: Row) -> list[Row]:
    """`Chain.weigh`: a number per row from the row's tokens and its number."""
    return [{"weight": row["x"] * 3 + sum(row["ids"])}]


def shift(row: Row) -> list[Row]:
    """`Chain.shift`: a token column from a token column."""
    return [{"next": [token + 1 for token in row["ids"]]}]


def spell(row: Row) -> list[Row]:
    """`Chain.spell`: an object from an object and a number."""
    return [{"word": row["name"] + "!" * (row["x"] % 3)}]


def twice(row: Row) -> list[Row]:
    """`Chain.twice`: two rows for each."""
    return [{"x": row["x"], "ids": [*row["ids"], k], "name": row["name"]} for k in (0, 1)]


def odd(row: Row) -> list[Row]:
    """`Chain.odd`: drops rows."""
    return [{"x": row["x"], "ids": list(row["ids"]), "name": row["name"]}] if row["x"] % 2 else []


METHODS: dict[str, Callable[[Row], list[Row]]] = {
    "weigh": weigh,
    "shift": shift,
    "spell": spell,
    "twice": twice,
    "odd": odd,
}
SAME_ROWS = ("weigh", "shift", "spell")
"""Methods that keep the rows, so that their columns go beside the batch's."""
