"""The form in which a call travels: a small request, and references beside it as top-level arguments.

`lower` runs in the driver and turns the parts of a call into positions in a list of references. In the host each
argument's `read` turns them back into tables and values, copying only where rows are picked out of order.
"""

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from flowrl.controller.dispatch import Arguments, Gather, Part
from flowrl.controller.errors import ContractError
from flowrl.controller.future import Future
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.register import Contract
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Block, LocalRef, Ref, Shard
from flowrl.data.batch.columns import gathers
from flowrl.data.batch.layout import GatherPlan
from flowrl.data.batch.payload import Payload, RowSelection, Source, collect, merge

_FOR_RAY = re.compile(rb"__main__|\x8c.ray[.\x94]", re.DOTALL)
"""In a pickle: the program that the user started, or the module or a package of Ray."""

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
                sources.append(Source(decode(objects[where]), columns, piece.rows, piece.at))
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
    awaits_peers: bool = True
    """Whether the rank talks to others, and so waits for the inputs of them all."""
    refs: list[Ref] = field(default_factory=list)
    sources: list[Ref] = field(default_factory=list)
    """The same references as the driver holds them, which know their calls."""
    _positions: dict[int, int] = field(default_factory=dict)
    """Of the first `_indexed` references: those of whole blocks are added without a look at each."""
    _indexed: int = 0
    _awaited: set[int] = field(default_factory=set)
    _read: set[int] = field(default_factory=set)

    def position(self, ref: Ref) -> int:
        carrier = ref.carrier
        for number in range(self._indexed, len(self.refs)):
            self._positions.setdefault(id(self.refs[number]), number)
        self._indexed = len(self.refs)
        if id(carrier) not in self._positions:
            self.refs.append(carrier)
            self.sources.append(ref)
        return self._positions.get(id(carrier), self._indexed)

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
            blocks.append(BlockArgument(plan, self.pieces(block, plan, columns)))
            if self.awaits_peers and len(block.shards) > 1:
                self._await(block)
        num_rows = part.rows[1] - part.rows[0] if isinstance(part.rows, tuple) else len(part.rows)
        return TableArgument(num_rows, tuple(blocks))

    def _await(self, block: Block) -> None:
        """A rank whose own shards are fine must not enter a collective alone when a peer's shard has failed."""
        if id(block) not in self._awaited:
            self._awaited.add(id(block))
            descriptions, carriers = block.remote_descriptions
            self.refs.extend(carriers)
            self.sources.extend(descriptions)

    def pieces(
        self, block: Block, plan: GatherPlan, columns: dict[str, str]
    ) -> tuple[tuple[int | Payload, dict[str, str]], ...]:
        """Where the rows of every piece of a block are, and what their columns are called there."""
        if block.remote_payloads is None or id(block) in self._read:
            return tuple(self.piece(block.shards[piece.shard], piece.rows, columns) for piece in plan.pieces)
        # One by one, the pieces of shuffled rows would be most of what a call costs the driver.
        self._read.add(id(block))
        payloads, carriers = block.remote_payloads
        shards = [piece.shard for piece in plan.pieces]
        positions = range(len(self.refs), len(self.refs) + len(shards))
        self.refs.extend(map(carriers.__getitem__, shards))
        self.sources.extend(map(payloads.__getitem__, shards))
        return tuple(zip(positions, repeat(columns)))

    def piece(self, shard: Shard, rows: RowSelection, columns: dict[str, str]) -> tuple[int | Payload, dict[str, str]]:
        """Where a piece's rows are, and what its columns are called there."""
        own = shard.sources(columns)
        if not isinstance(shard.payload, LocalRef):
            return self.position(shard.payload), own
        held: Payload = shard.payload.value
        if held.nbytes_of(rows, own) <= BY_VALUE_BYTES:
            return held.take(rows, own), {name: name for name in own}
        return self.position(self.share(shard.payload)), own


def lower(arguments: Arguments, references: References) -> dict[str, Any]:
    """Arguments as they travel; fills `references` with what they refer to."""
    return {name: references.argument(value) for name, value in arguments.items()}


def encode(value: Any) -> Any:  # Any: requests, reports and payloads
    """The value as bytes, or as it is where it is large or takes more than pickle.

    Ray pickles in Python, and stores bytes as they are: this is three times as fast for the small objects that every
    call sends and returns. What is large stays outside of the pickle, to be read without a copy; functions and classes
    of the program that the user started are for Ray to pickle by value, and its own objects for it to count.
    """
    budget = BY_VALUE_BYTES

    def inside(buffer: pickle.PickleBuffer) -> bool:
        nonlocal budget
        budget -= buffer.raw().nbytes
        return budget >= 0

    try:
        data = pickle.dumps(value, protocol=5, buffer_callback=inside)
    except (pickle.PicklingError, AttributeError, TypeError):
        return value
    fits = budget >= 0 and len(data) <= 2 * BY_VALUE_BYTES
    return data if fits and not _FOR_RAY.search(data) else value


def decode(value: Any) -> Any:
    """What `encode` was given."""
    return pickle.loads(value) if isinstance(value, bytes) else value


def _holds_reference(value: dict | list | tuple) -> bool:
    return any(isinstance(item, Batch | Future) for item in (value.values() if isinstance(value, dict) else value))
