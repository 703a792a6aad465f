import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.train.microbatch import microbatches
from tests.engines.tables import table


def table_of(*row_lengths: int):
    total = sum(row_lengths)
    tokens = {"input_ids": torch.arange(1, total + 1), "response_mask": torch.ones(total, dtype=torch.bool)}
    rows = {"scores": torch.arange(len(row_lengths)) * 10.0, "prompt": [f"p{i}" for i in range(len(row_lengths))]}
    return make_tensordict(rows, tokens, torch.tensor(row_lengths, dtype=torch.int64), len(row_lengths))


def test_rows_of_similar_length_share_a_micro_batch():
    micros = microbatches(table_of(3, 1, 2, 1), 4)
    assert [micro.index.tolist() for micro in micros] == [[1, 3], [2], [0]]


def test_packed_rows_share_a_micro_batch_up_to_the_sum_of_their_tokens():
    micros = microbatches(table_of(3, 1, 2, 1, 3), 7, packed=True)
    assert [micro.index.tolist() for micro in micros] == [[1, 3, 2, 0], [4]]
    assert micros[0].pack is not None and micros[0].pack.lengths == (1, 1, 2, 3)
    assert micros[0].pack.pack(micros[0].input_ids).tolist() == [[4, 7, 5, 6, 1, 2, 3]]


def test_padded_rows_are_split_where_their_length_jumps():
    """Together 12 x 3 tokens, of which 16 real, cost more than a pass beside 10 x 1 and 2 x 3."""
    assert [micro.input_ids.shape for micro in microbatches(table_of(*[1] * 10, 3, 3), 36)] == [(10, 1), (2, 3)]
    assert [micro.input_ids.shape for micro in microbatches(table_of(*[1] * 10, 3, 3), 400)] == [(12, 3)]


def test_tokens_are_right_padded_with_their_columns():
    (micro,) = microbatches(table_of(3, 1), 100)
    assert micro.input_ids.tolist() == [[4, 0, 0], [1, 2, 3]]
    assert micro.mask.tolist() == [[True, False, False], [True, True, True]]
    assert torch.equal(micro.tokens["response_mask"], micro.mask)
    assert micro.rows["scores"].tolist() == [10.0, 0.0]
    assert micro.lengths.tolist() == [1, 3]


def test_object_columns_are_dropped():
    (micro,) = microbatches(table_of(3, 1), 100)
    assert set(micro.rows) == {"scores"} and set(micro.tokens) == {"response_mask"}


def test_a_row_longer_than_the_budget_is_a_micro_batch_by_itself():
    assert [micro.input_ids.shape for micro in microbatches(table_of(9, 9, 2), 4)] == [(1, 2), (1, 9), (1, 9)]


def test_an_empty_batch_has_no_micro_batches():
    assert microbatches(table_of(), 4) == []


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 20), max_tokens=st.integers(1, 80), seed=st.integers(0, 9), packed=st.booleans())
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(
    num_rows: int, max_tokens: int, seed: int, packed: bool
):
    rows = table(num_rows, seed)
    micros = microbatches(rows, max_tokens, packed=packed)
    index = torch.cat([micro.index for micro in micros])
    assert sorted(index.tolist()) == list(range(num_rows))
    assert torch.equal(torch.cat([micro.lengths for micro in micros]), lengths(rows)[index])
    tokens = [int(micro.mask.sum()) if packed else micro.input_ids.numel() for micro in micros]
    assert all(n <= max_tokens or len(micro.index) == 1 for n, micro in zip(tokens, micros, strict=True))


def cheapest(ascending: list[int], max_tokens: int) -> float:
    """Returns the lowest cost of all splits within the budget, by enumeration."""
    if not ascending:
        return 0.0
    sizes = [n for n in range(1, len(ascending) + 1) if n == 1 or n * ascending[-1] <= max_tokens]
    return min(
        n * ascending[-1] + max_tokens / 16 + cheapest(ascending[: len(ascending) - n], max_tokens) for n in sizes
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 40))
def test_no_other_split_of_padded_rows_is_cheaper(row_lengths: list[int], max_tokens: int):
    actual = sum(
        micro.input_ids.numel() + max_tokens / 16 for micro in microbatches(table_of(*row_lengths), max_tokens)
    )
    assert abs(actual - cheapest(sorted(row_lengths), max_tokens)) < 1e-9


def test_moving_to_the_same_device_returns_the_same_object():
    (micro,) = microbatches(table_of(2), 4)
    assert micro.to("cpu") is micro
