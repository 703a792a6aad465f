"""Blocks: columns that were computed together, as shards of rows behind references."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowrl.data.batch.payload import Payload


class Ref(Protocol):
    """One value, here or in the object store, perhaps not computed yet."""

    @property
    def carrier(self) -> "Ref":
        """What travels to a host in this reference's place."""
        ...

    def get(self) -> Any: ...  # Any: a payload, a description or a method's own result

    def get_with(self, others: "Sequence[Ref]") -> list[Any]:
        """The values of this and other references of its type, read together."""
        ...

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

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.value, *(other.get() for other in others)]

    def done(self) -> bool:
        return True


def read_together(refs: Sequence[Ref]) -> list[Any]:  # Any: see Ref
    """The values of references, those of one type at once."""
    values: dict[int, Any] = {}
    by_type: dict[type, list[Ref]] = {}
    for ref in refs:
        by_type.setdefault(type(ref), []).append(ref)
    for first, *others in by_type.values():
        values |= zip(map(id, (first, *others)), first.get_with(others), strict=True)
    return [values[id(ref)] for ref in refs]


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
    names: Mapping[str, str] | None = None
    """Column of the block -> what the payload calls it. None: the same."""

    def source(self, name: str) -> str:
        """What the payload calls a column of the block."""
        return name if self.names is None else self.names[name]

    def sources(self, columns: dict[str, str]) -> dict[str, str]:
        """`{name: column of the block}` as `{name: column of the payload}`."""
        return columns if self.names is None else {name: self.names[column] for name, column in columns.items()}

    def renamed(self, names: Mapping[str, str]) -> "Shard":
        """The same rows in a block that calls columns otherwise: `names` maps its names to this block's."""
        return replace(self, names={name: self.source(source) for name, source in names.items()})


class Block:
    """Columns that were computed together, as shards of rows."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows per shard; waits for the descriptions of results whose row count no contract states."""
        known = (s.description.get().num_rows if s.num_rows is None else s.num_rows for s in self.shards)
        return np.fromiter(known, dtype=np.int64, count=len(self.shards))

    @cached_property
    def layout(self) -> bytes:
        """Equal for blocks whose shards have the same sizes."""
        return self.sizes.tobytes()

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def remote_descriptions(self) -> tuple[list[Ref], list[Ref]]:
        """The descriptions of the shards that are not in this process, and what travels in their place."""
        found = [s.description for s in self.shards if not isinstance(s.description, LocalRef)]
        return found, [description.carrier for description in found]

    @cached_property
    def remote_payloads(self) -> tuple[list[Ref], list[Ref]] | None:
        """The payloads of all shards, and what travels in their place; None where one needs a look of its own, as it is
        in this process or calls its columns otherwise."""
        if any(isinstance(s.payload, LocalRef) or s.names is not None for s in self.shards):
            return None
        return [s.payload for s in self.shards], [s.payload.carrier for s in self.shards]

    def kind(self, name: str) -> str | None:
        """One of "row", "object" and "token"; waits for the first description. None: there is no such column."""
        return self.shards[0].description.get().columns.get(self.shards[0].source(name))

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
