import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data.batch.payload import Payload
from flowrl.data.batch.tensordicts import (
    from_tensordict,
    lengths,
    make_tensordict,
    num_rows,
    objects,
    pad_tokens,
    sum_tokens,
    to_tensordict,
    unpad_tokens,
)
from tests.engines.tables import take_rows


def table_of(*row_lengths: int):
    rows = {"x": torch.arange(len(row_lengths)), "name": [f"r{i}" for i in range(len(row_lengths))]}
    return make_tensordict(rows, {"ids": torch.arange(sum(row_lengths))}, torch.tensor(row_lengths, dtype=torch.int64))


def test_rows_lengths_and_objects():
    batch = table_of(2, 0, 1)
    assert (num_rows(batch), lengths(batch).tolist(), objects(batch, "name")) == (3, [2, 0, 1], ["r0", "r1", "r2"])


@pytest.mark.parametrize(
    "values",
    [[[1, 2], [3, 4]], [[1], [], [2, 3]], [{"a": 1}, {"a": 2}], [None, "x"], [["a", ["b"]], ["c", ["d"]]], [(1, 2)]],
)
def test_objects_are_returned_unchanged(values: list):
    assert objects(make_tensordict({"o": values}), "o") == values


def test_objects_of_an_empty_batch_are_an_empty_list():
    assert objects(make_tensordict({"o": []}, num_rows=0), "o") == []


def test_tokens_are_summed_over_the_mask_of_each_row():
    """Values outside the mask may be NaN. The longest row is not the first, and one row has no tokens."""
    values = torch.tensor([math.nan, 2.0, 0.5, 1.0, math.nan, -1.0])
    mask = torch.tensor([False, True, True, True, False, True])
    assert sum_tokens(values, mask, torch.tensor([2, 0, 4])).tolist() == [2.0, 0.0, 0.5]
    assert sum_tokens(mask, mask, torch.tensor([2, 0, 4])).tolist() == [1, 0, 3]


def test_a_missing_object_column_is_named_with_the_available_ones():
    with pytest.raises(KeyError, match=r"'y'.* x, name, length"):
        objects(table_of(1), "y")


def test_row_columns_of_different_sizes_are_rejected():
    with pytest.raises(ValueError, match=r"y .*3.* 2\b"):
        make_tensordict({"x": torch.zeros(2), "y": torch.zeros(3)})


def test_token_columns_need_lengths():
    with pytest.raises(ValueError, match=r"ids.*lengths"):
        make_tensordict(tokens={"ids": torch.zeros(2)})


def test_token_columns_have_the_sum_of_the_lengths():
    with pytest.raises(ValueError, match=r"ids .*3.* 2\b"):
        make_tensordict(tokens={"ids": torch.zeros(3)}, lengths=torch.tensor([1, 1]))


def test_padding_is_on_the_right():
    padded = pad_tokens(torch.arange(1, 6), torch.tensor([2, 0, 3]), padding=-1)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]


@given(st.lists(st.integers(0, 5), max_size=6))
@settings(deadline=None)
def test_unpadding_undoes_padding(row_lengths: list[int]):
    lengths_B = torch.tensor(row_lengths, dtype=torch.int64)
    values_T = torch.arange(sum(row_lengths))
    assert torch.equal(unpad_tokens(pad_tokens(values_T, lengths_B, padding=-1), lengths_B), values_T)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), st.randoms())
@settings(deadline=None)
def test_taking_rows_takes_their_tokens(cases, random):
    batch = table_of(*(length for length, _ in cases))
    index = [i for i, (_, is_selected) in enumerate(cases) if is_selected]
    random.shuffle(index)
    selected = take_rows(batch, torch.tensor(index, dtype=torch.int64))
    split = torch.split(batch["tokens", "ids"], lengths(batch).tolist())
    assert objects(selected, "name") == [f"r{i}" for i in index]
    assert selected["tokens", "ids"].tolist() == [token for i in index for token in split[i].tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool])
def test_every_dtype_survives_the_payload(dtype: torch.dtype):
    values = torch.tensor([[1, 0], [3, 2]]).to(dtype)
    batch = make_tensordict({"x": values}, {"t": values.flatten()}, torch.tensor([3, 1]))
    restored = to_tensordict(from_tensordict(batch))
    assert restored["rows", "x"].dtype == restored["tokens", "t"].dtype == dtype
    assert torch.equal(restored["rows", "x"], values) and torch.equal(restored["tokens", "t"], values.flatten())


def test_bfloat16_is_stored_as_int16():
    payload = from_tensordict(make_tensordict({"x": torch.zeros(2, dtype=torch.bfloat16)}))
    assert (np.asarray(payload.rows["x"]).dtype, payload.bfloat16) == (np.int16, {"x"})


def test_writing_to_a_copy_leaves_the_payload_unchanged():
    payload = Payload(2, {"x": np.zeros(2)})
    to_tensordict(payload, copy=True)["rows", "x"].fill_(1)
    assert list(payload.rows["x"]) == [0, 0]


def test_token_columns_without_lengths_take_the_lengths_of_the_input():
    batch = table_of(2, 1)
    del batch["rows"]["length"]
    selected = from_tensordict(batch, np.array([2, 1])).lengths
    assert selected is not None and selected.tolist() == [2, 1]


def test_token_columns_that_fit_no_lengths_are_rejected():
    batch = table_of(2, 1)
    del batch["rows"]["length"]
    with pytest.raises(ValueError, match=r"'ids'.* 3 .* 5"):
        from_tensordict(batch, np.array([2, 3]))
