import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray

from flowrl import Batch
from flowrl.controller.dispatch import BatchSlice
from flowrl.controller.wire import BY_VALUE_BYTES, References, TableArgument, decode, encode, lower_arguments
from flowrl.data.batch.block import Block, Description, Ref, Shard
from flowrl.data.batch.payload import Payload


@dataclass(frozen=True, eq=False)
class StoredRef:
    """A value that counts as being elsewhere."""

    value: Any

    @property
    def carrier(self) -> "StoredRef":
        return self

    def get(self) -> Any:
        return self.value

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]

    def done(self) -> bool:
        return True


def stored(*shards: list[int]) -> Batch:
    """A batch of the column `x` whose shards are elsewhere."""
    payloads = [Payload(len(shard), {"x": np.array(shard), "y": np.zeros(len(shard))}) for shard in shards]
    block = Block([Shard(StoredRef(p), StoredRef(Description.of(p)), p.num_rows) for p in payloads])
    return Batch.of_block(block, ("x", "y"))


def sent(batch: Batch, rows, columns=("x",)) -> tuple[TableArgument, References]:
    references = References(lambda local: StoredRef(local.value))
    return lower_arguments({"table": BatchSlice(batch, rows, columns)}, references)["table"], references


def read(argument: TableArgument, references: References) -> dict[str, list]:
    payload = argument.read([ref.get() for ref in references.refs])
    return {name: list(column) for name, column in payload.rows.items()}


@pytest.mark.parametrize("rows", [(0, 2), (1, 4), (0, 5), (2, 2), np.array([4, 0, 0, 2]), np.array([], dtype=np.int64)])
def test_requested_rows_arrive_in_the_requested_order(rows):
    batch = Batch.concat([stored([10, 11], [12]), Batch.from_columns({"x": [13, 14], "y": [0.0, 0.0]})])
    expected = np.arange(10, 15)[slice(*rows) if isinstance(rows, tuple) else rows]
    assert read(*sent(batch, rows)) == {"x": expected.tolist()}


def test_a_column_under_two_names_arrives_under_both():
    batch = Batch.from_columns({"x": [1, 2]})
    batch["y"] = batch["x"]
    assert read(*sent(batch.rows([1]), (0, 1), ("x", "y"))) == {"x": [2], "y": [2]}


def test_small_rows_of_the_driver_are_sent_in_the_request():
    _, references = sent(Batch.from_columns({"x": [1, 2]}), (0, 2))
    assert references.refs == []


def test_only_the_selected_rows_and_columns_count_as_small():
    batch = Batch.from_columns({"x": np.arange(BY_VALUE_BYTES), "y": np.zeros((BY_VALUE_BYTES, 4))})
    assert sent(batch, (10, 20))[1].refs == []
    assert len(sent(batch, (0, BY_VALUE_BYTES))[1].refs) == 1


def test_a_rank_also_waits_for_the_shards_that_its_peers_read():
    batch = stored([1], [2], [3])
    _, references = sent(batch, (0, 1))
    shards = batch.column("x").block.shards
    assert references.refs == [shards[0].payload, *(shard.description for shard in shards)]


def test_a_rank_without_peers_waits_only_for_its_own_shards():
    batch = stored([1], [2], [3])
    references = References(lambda local: StoredRef(local.value), awaits_peers=False)
    lower_arguments({"table": BatchSlice(batch, (0, 1), ("x",))}, references)
    assert references.refs == [batch.column("x").block.shards[0].payload]


def test_a_reference_is_sent_once_for_any_number_of_reads():
    batch = stored([1, 2]).repeat(2)
    assert len(sent(batch.union(batch.rename({"x": "z", "y": "w"})), (0, 4), ("x", "z"))[1].refs) == 1


def test_a_batch_without_columns_keeps_its_number_of_rows():
    argument, _ = sent(Batch.from_columns({"x": [1, 2]}), (0, 2), ())
    assert argument.read([]).num_rows == 2


def test_other_arguments_are_sent_unchanged():
    assert lower_arguments({"x": [1, {"y": None}]}, References(lambda local: local)) == {"x": [1, {"y": None}]}


@pytest.mark.parametrize("value", [None, {"x": [1, None]}, b"bytes", ("a", 1.5)])
def test_small_values_are_pickled_inline(value):
    encoded = encode(value)
    assert isinstance(encoded, bytes) and decode(encoded) == value


def test_small_arrays_are_pickled_inline():
    payload = decode(encode(Payload(2, {"x": np.arange(2)}, bfloat16=frozenset({"y"}))))
    assert payload.rows["x"].tolist() == [0, 1] and payload.bfloat16 == {"y"}


def test_only_the_view_of_large_rows_is_sent():
    assert len(encode(np.arange(BY_VALUE_BYTES)[:4])) < 1000


def test_large_arrays_are_sent_out_of_band_and_read_without_a_copy():
    large = Payload(1, {"x": np.zeros(BY_VALUE_BYTES)})
    assert encode(large) is large and decode(large) is large


def test_small_arrays_count_by_their_total_size():
    parts = [np.zeros(BY_VALUE_BYTES // 16) for _ in range(3)]
    assert encode(parts) is parts


def test_functions_without_an_importable_name_are_pickled_by_ray():
    def local() -> None: ...

    arguments = {"fn": local}
    assert encode(arguments) is arguments


def test_definitions_of_the_main_program_are_pickled_by_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["__main__"], "StoredRef", StoredRef, raising=False)
    monkeypatch.setattr(StoredRef, "__module__", "__main__")
    value = StoredRef(1)
    assert encode(value) is value


def test_ray_references_are_passed_to_ray_for_counting():
    reference = ray.ObjectRef.from_random()
    assert encode([reference]) == [reference]
