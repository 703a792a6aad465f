"""Blocks: columns that were computed together, as shards of rows behind references."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowrl.data.payload import Payload


class Ref(Protocol):
    """One value, here or in the object store, perhaps not computed yet."""

    @property
    def carrier(self) -> "Ref":
        """What travels to a host in this reference's place."""
        ...

    def get(self) -> Any: ...  # Any: a payload, a description or a method's own result

    def done(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class LocalRef:
    """A value in this process."""

    value: Any  # Any: see Ref

    @property
    def carrier(self) -> "LocalRef":
        return self

    def get(self) -> Any:
        return self.value

    def done(self) -> bool:
        return True


@dataclass(frozen=True)
class Description:
    """What the driver may know of a result without its values."""

    num_rows: int
    columns: Mapping[str, str]
    """Column -> "row", "object" or "token"."""
    lengths: np.ndarray | None = None

    @staticmethod
    def of(payload: Payload) -> "Description":
        kinds = {name: "row" if isinstance(c, np.ndarray) else "object" for name, c in payload.rows.items()}
        return Description(payload.num_rows, kinds | dict.fromkeys(payload.tokens, "token"), payload.lengths)


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of a result: its payload, and the small description that travels apart from it."""

    payload: Ref
    description: Ref
    num_rows: int | None
    """None until the description says it."""


class Block:
    """Columns that were computed together, as shards of rows."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)

    @property
    def sizes(self) -> list[int]:
        """Rows per shard; waits for the descriptions of results whose row count no contract states."""
        return [s.description.get().num_rows if s.num_rows is None else s.num_rows for s in self.shards]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def done(self) -> bool:
        return all(shard.description.done() for shard in self.shards)

    def lengths(self) -> np.ndarray | None:
        """Tokens per row `[rows]`, from the descriptions; None without token columns."""
        parts = [shard.description.get().lengths for shard in self.shards]
        present = [part for part in parts if part is not None]
        return np.concatenate(present) if present else None


class Column(NamedTuple):
    """Where a batch finds a column: `index` maps its rows to the block's (None: they are the same)."""

    block: Block
    index: np.ndarray | None
    source: str
