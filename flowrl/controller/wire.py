"""The form in which a call travels: a small request, and references beside it as top-level arguments.

`lower` runs in the driver and turns the parts of a call into positions in a list of references. `raise_arguments` runs
in the host and turns them back into tables and values, copying only where rows are picked out of order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.controller.dispatch import Arguments, Gather, Part
from flowrl.controller.errors import ContractError
from flowrl.controller.future import Future
from flowrl.controller.plan import Mesh
from flowrl.controller.register import Contract
from flowrl.data.batch import Batch
from flowrl.data.block import LocalRef, Ref, Shard
from flowrl.data.columns import gathers
from flowrl.data.layout import GatherPlan
from flowrl.data.payload import Payload, RowSelection, Source, collect, merge

BY_VALUE_BYTES = 64 * 1024
"""Driver-made rows up to this size travel inside the request: an object of their own costs milliseconds."""


@dataclass(frozen=True)
class BlockArgument:
    """Rows of one block: how to gather them, and where each piece's shard is.

    A piece comes from an object beside the request, by its position, or holds its rows itself. With each goes
    `{name: name in that piece}`.
    """

    plan: GatherPlan
    pieces: tuple[tuple[int | Payload, dict[str, str]], ...]

    def read(self, objects: Sequence) -> Payload:
        sources = []
        for piece, (where, columns) in zip(self.plan.pieces, self.pieces, strict=True):
            if isinstance(where, Payload):
                sources.append(Source(where, columns, None, piece.at))
            else:
                sources.append(Source(objects[where], columns, piece.rows, piece.at))
        return collect(self.plan.num_rows, sources)


@dataclass(frozen=True)
class TableArgument:
    """One rank's part of a batch."""

    num_rows: int
    blocks: tuple[BlockArgument, ...]

    def read(self, objects: Sequence) -> Payload:
        parts = [block.read(objects) for block in self.blocks]
        return merge(parts) if parts else Payload(self.num_rows)


@dataclass(frozen=True)
class FutureArgument:
    """The result of an earlier call, gathered in the host that takes it."""

    positions: tuple[int, ...]
    gather: Gather
    mesh: Mesh

    def read(self, objects: Sequence) -> Any:
        return self.gather(self.mesh, [objects[position] for position in self.positions])


@dataclass(frozen=True)
class Request:
    """One call for one rank."""

    number: int
    """Counts the driver's requests."""
    role: str
    rank: int
    node: int
    method: str
    arguments: dict[str, Any]
    contract: Contract
    returns_batch: bool
    """Whether the result is a table whose columns and rows the contract states."""
    answers: bool = True
    """False for a rank whose data-parallel leader answers for it: its result is dropped where it is."""


@dataclass
class References:
    """The references that travel beside one request, each once."""

    share: Callable[[LocalRef], Ref]
    """Puts rows of the driver where every host can read them."""
    refs: list[Ref] = field(default_factory=list)
    sources: list[Ref] = field(default_factory=list)
    """The same references as the driver holds them, which know their calls."""
    _positions: dict[int, int] = field(default_factory=dict)

    def position(self, ref: Ref) -> int:
        carrier = ref.carrier
        if id(carrier) not in self._positions:
            self._positions[id(carrier)] = len(self.refs)
            self.refs.append(carrier)
            self.sources.append(ref)
        return self._positions[id(carrier)]

    def argument(self, value: Any) -> Any:
        """The travelling form of one argument."""
        if isinstance(value, Part):
            return self.table(value)
        if isinstance(value, dict | list | tuple) and _holds_reference(value):
            raise ContractError(
                "a Batch or Future inside a list or dictionary is not followed; pass it as an argument of its own"
            )
        if isinstance(value, Future):
            return FutureArgument(tuple(self.position(ref) for ref in value.refs), value.gather, value.mesh)
        return value

    def table(self, part: Part) -> TableArgument:
        blocks = []
        for block, columns, plan in gathers({n: part.batch.column(n) for n in part.columns}, part.rows):
            pieces = tuple(self.piece(block.shards[piece.shard], piece.rows, columns) for piece in plan.pieces)
            blocks.append(BlockArgument(plan, pieces))
            if len(block.shards) > 1:
                # A rank whose own shards are fine must not enter a collective alone when a peer's shard has failed.
                for description in block.remote_descriptions:
                    self.position(description)
        num_rows = part.rows[1] - part.rows[0] if isinstance(part.rows, tuple) else len(part.rows)
        return TableArgument(num_rows, tuple(blocks))

    def piece(self, shard: Shard, rows: RowSelection, columns: dict[str, str]) -> tuple[int | Payload, dict[str, str]]:
        """Where a piece's rows are, and what its columns are called there."""
        own = columns if shard.names is None else {name: shard.source(source) for name, source in columns.items()}
        if not isinstance(shard.payload, LocalRef):
            return self.position(shard.payload), own
        held: Payload = shard.payload.value
        if held.nbytes_of(rows, own) <= BY_VALUE_BYTES:
            return held.take(rows, own), {name: name for name in own}
        return self.position(self.share(shard.payload)), own


def lower(arguments: Arguments, references: References) -> dict[str, Any]:
    """Arguments as they travel; fills `references` with what they refer to."""
    return {name: references.argument(value) for name, value in arguments.items()}


def _holds_reference(value: dict | list | tuple) -> bool:
    return any(isinstance(item, Batch | Future) for item in (value.values() if isinstance(value, dict) else value))
