import numpy as np
import pytest
import torch

from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import Block, Description, LocalRef, Shard
from flowrl.data.batch.columns import gathers, joined
from flowrl.data.batch.payload import Payload


def sharded(*sizes: int, first: int = 0, name: str = "x") -> Batch:
    """Rows numbered from `first` on, in shards of these sizes."""
    shards = []
    for size in sizes:
        payload = Payload(
            size,
            {name: np.arange(first, first + size), "names": [f"r{i}" for i in range(first, first + size)]},
            {"ids": np.repeat(np.arange(first, first + size), 2)},
            np.full(size, 2),
        )
        shards.append(Shard(LocalRef(payload), LocalRef(Description.of(payload)), size))
        first += size
    return Batch.of_block(Block(shards), (name, "names", "ids"))


def sizes_of(batch: Batch, name: str = "x") -> list[int]:
    return batch.column(name).block.sizes.tolist()


def check(batch: Batch, rows: list[int], name: str = "x") -> None:
    """Every kind of column holds these rows."""
    assert batch.get(name).tolist() == rows
    assert batch.get("names") == [f"r{i}" for i in rows]
    assert batch.get("ids").tolist() == [i for i in rows for _ in range(2)]


def test_blocks_of_one_index_and_layout_share_a_plan():
    batch = sharded(3, 3).select("x").union(sharded(3, 3).select("x").rename({"x": "y"})).reorder([5, 3, 1, 4, 2, 0])
    plans = [plan for _, _, plan in gathers({name: batch.column(name) for name in ("x", "y")}, (0, 4))]
    assert len(plans) == 2 and plans[0] is plans[1]


def test_joined_blocks_of_one_index_and_layout_share_an_index():
    batch = sharded(3, 3).select("x").union(sharded(3, 3).select("x").rename({"x": "y"})).reorder([5, 3, 1, 4, 2, 0])
    columns = joined(("x", "y"), [batch._columns, batch._columns])
    assert columns["x"].index is columns["y"].index and columns["x"].block is not columns["y"].block


def test_columns_that_blocks_call_otherwise_are_joined():
    renamed = sharded(2, first=3, name="number").rename({"number": "x"})
    both = Batch.concat([sharded(1, 2), renamed.rows([1, 0])])
    check(both, [0, 1, 2, 4, 3])
    check(Batch.concat([both.rename({"x": "z"}), sharded(1, first=7).rename({"x": "z"})]), [0, 1, 2, 4, 3, 7], "z")


def test_two_columns_that_exchanged_names_are_joined():
    batch = Batch.from_columns({"a": [1], "b": [2]})
    both = Batch.concat([batch, batch.rename({"a": "b", "b": "a"})])
    assert (both.get("a").tolist(), both.get("b").tolist()) == ([1, 2], [2, 1])


def test_lengths_are_found_under_another_name():
    tokens = Batch.from_columns(tokens={"t": [1, 2, 3]}, lengths=[1, 2])
    other = Batch.from_columns(tokens={"u": [4]}, lengths=[1]).rename({"u": "t"})
    assert Batch.concat([tokens, other]).lengths().tolist() == [1, 2, 1]


def test_a_batch_of_most_rows_stays_as_it_is():
    batch = sharded(4, 4).rows([0, 1, 4, 5, 6])
    assert batch.compacted().column("x").block is batch.column("x").block
    assert sharded(4).compacted().get("x").tolist() == [0, 1, 2, 3]


def test_rows_of_sparse_shards_are_rewritten_and_full_shards_stay():
    batch = sharded(8, 2, 8).rows([17, 8, 9, 8, 1])
    compacted = batch.compacted()
    check(compacted, [17, 8, 9, 8, 1])
    assert sizes_of(compacted) == [4]
    stays = sharded(9, 8).rows([*range(9), 12]).compacted()
    check(stays, [*range(9), 12])
    assert sizes_of(stays) == [9, 1]


def test_shards_without_a_row_are_let_go():
    compacted = sharded(3, 3).rows([4, 3, 5]).compacted()
    check(compacted, [4, 3, 5])
    assert sizes_of(compacted) == [3]


def test_a_batch_of_no_rows_still_knows_its_columns():
    compacted = sharded(3, 3).rows([]).compacted()
    check(compacted, [])
    assert sizes_of(compacted) == [0]


def test_rows_that_other_columns_take_are_kept():
    batch = sharded(8).rows([1, 2]).select("x")
    batch["y"] = sharded(8).rows([7, 7])["x"]
    column = batch.column("x")
    batch["z"] = Batch({"z": column._replace(index=np.array([5, 6]))})
    compacted = batch.compacted()
    assert [compacted.get(name).tolist() for name in "xyz"] == [[1, 2], [7, 7], [5, 6]]
    assert compacted.column("x").block is column.block and sizes_of(compacted, "y") == [1]


def test_columns_of_one_index_share_one_afterwards():
    batch = sharded(8).rows([6, 1])
    compacted = batch.compacted()
    assert compacted.column("x").index is compacted.column("ids").index


def test_bfloat16_and_values_of_several_numbers_stay_exact():
    values = torch.tensor([[0.1, 1.5], [2.25, -3.0], [1e30, 0.0], [7.0, 7.5]], dtype=torch.bfloat16)
    bits = Payload(4, {"x": values.view(torch.int16).numpy()}, bfloat16=frozenset({"x"}))
    compacted = Batch.of_payload(bits).rows([2]).compacted().get("x")
    assert compacted.dtype == torch.bfloat16 and torch.equal(compacted, values[[2]])


@pytest.mark.parametrize("steps", [200])
def test_many_compactions_leave_few_shards_that_hold_little(steps: int):
    """A buffer that keeps 2 of every 100 rows."""
    buffer, kept = sharded(100).rows([3, 50]), [3, 50]
    for step in range(1, steps):
        rows = [100 * step + step % 100, 100 * step + (7 * step) % 100]
        buffer = Batch.concat([buffer, sharded(50, 50, first=100 * step).rows([r - 100 * step for r in rows])])
        buffer, kept = buffer.compacted(), kept + rows
    check(buffer, kept)
    assert len(sizes_of(buffer)) <= 10 and sum(sizes_of(buffer)) <= 2 * len(kept)


def test_a_compacted_batch_can_be_joined_and_compacted_under_other_names():
    first = sharded(10, name="number").rename({"number": "x"}).rows([9, 0]).compacted()
    both = Batch.concat([first, sharded(10, first=10).rows([3])]).compacted()
    check(both, [9, 0, 13])
    assert sizes_of(both) == [2, 1]
