import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data.table import lengths, make_table
from flowrl.engines.microbatch import microbatches
from tests.engines.tables import table


def table_of(*row_lengths: int):
    total = sum(row_lengths)
    tokens = {"input_ids": torch.arange(1, total + 1), "response_mask": torch.ones(total, dtype=torch.bool)}
    rows = {"scores": torch.arange(len(row_lengths)) * 10.0, "prompt": [f"p{i}" for i in range(len(row_lengths))]}
    return make_table(rows, tokens, torch.tensor(row_lengths, dtype=torch.int64), len(row_lengths))


def test_rows_of_similar_length_share_a_micro_batch():
    micros = microbatches(table_of(3, 1, 2, 1), 4)
    assert [micro.index.tolist() for micro in micros] == [[1, 3], [2], [0]]


def test_tokens_are_right_padded_with_their_columns():
    (micro,) = microbatches(table_of(3, 1), 100)
    assert micro.input_ids.tolist() == [[4, 0, 0], [1, 2, 3]]
    assert micro.mask.tolist() == [[True, False, False], [True, True, True]]
    assert torch.equal(micro.tokens["response_mask"], micro.mask)
    assert micro.rows["scores"].tolist() == [10.0, 0.0]
    assert micro.lengths.tolist() == [1, 3]


def test_object_columns_stay_behind():
    (micro,) = microbatches(table_of(3, 1), 100)
    assert set(micro.rows) == {"scores"} and set(micro.tokens) == {"response_mask"}


def test_a_row_longer_than_the_budget_stands_alone():
    assert [micro.input_ids.shape for micro in microbatches(table_of(9, 9, 2), 4)] == [(1, 2), (1, 9), (1, 9)]


def test_an_empty_table_gives_no_micro_batches():
    assert microbatches(table_of(), 4) == []


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 20), max_tokens=st.integers(1, 80), seed=st.integers(0, 9))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(num_rows: int, max_tokens: int, seed: int):
    rows = table(num_rows, seed)
    micros = microbatches(rows, max_tokens)
    index = torch.cat([micro.index for micro in micros])
    assert sorted(index.tolist()) == list(range(num_rows))
    assert torch.equal(torch.cat([micro.lengths for micro in micros]), lengths(rows)[index])
    assert all(micro.input_ids.numel() <= max_tokens or len(micro.index) == 1 for micro in micros)


def test_moving_to_the_same_device_gives_the_same_object():
    (micro,) = microbatches(table_of(2), 4)
    assert micro.to("cpu") is micro
