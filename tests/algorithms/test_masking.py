"""Tests validation, promotion and zeroing of masked inputs, and masked reductions."""

import pytest
import torch

from flowrl.algorithms.masking import (
    at_least_float32,
    last_masked,
    masked_mean,
    masked_range,
    masked_rows,
    masked_tokens,
    row_mean,
)


def test_masked_tokens_zeroes_masked_nan():
    mask = torch.tensor([[True, False, False]])
    (values,) = masked_tokens(mask, values=torch.tensor([[2.0, float("nan"), float("inf")]]))
    assert values.tolist() == [[2.0, 0.0, 0.0]]


def test_masked_tokens_rejects_a_mask_that_is_not_bool():
    with pytest.raises(ValueError, match=r"mask .*torch.float32.*mask.bool\(\)"):
        masked_tokens(torch.ones(1, 2))


def test_masked_tokens_rejects_a_mask_that_is_not_two_dimensional():
    with pytest.raises(ValueError, match=r"mask .*\[2\]"):
        masked_tokens(torch.ones(2, dtype=torch.bool))


def test_masked_tokens_rejects_to_broadcast_and_names_the_tensor():
    with pytest.raises(ValueError, match=r"values .*\[2, 1\].*\[2, 3\]"):
        masked_tokens(torch.ones(2, 3, dtype=torch.bool), values=torch.ones(2, 1))


def test_masked_rows_rejects_another_number_of_rows_and_names_the_tensor():
    with pytest.raises(ValueError, match=r"scores .*\[3\].*\[2\]"):
        masked_rows(torch.ones(2, 3, dtype=torch.bool), scores=torch.ones(3))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_at_least_float32_promotes_half_and_integers_only(dtype: torch.dtype, expected: torch.dtype):
    assert at_least_float32(torch.ones(1, dtype=dtype)).dtype == expected


def test_masked_mean_counts_true_positions_only():
    mask = torch.tensor([[True, True, False], [False, True, False]])
    values = torch.tensor([[1.0, 2.0, 100.0], [100.0, 6.0, 100.0]])
    assert masked_mean(values, mask).item() == 3.0


def test_masked_mean_of_an_empty_mask_is_zero():
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).item() == 0.0


def test_masked_range_uses_only_true_positions_and_carries_no_gradient():
    values = torch.tensor([[3.0, float("nan"), -1.0], [9.0, -9.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    smallest, largest = masked_range(values, mask)
    assert (smallest.item(), largest.item()) == (-1.0, 3.0)
    assert not smallest.requires_grad and not largest.requires_grad


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_masked_range_of_an_empty_mask_is_neutral(shape: tuple[int, int]):
    smallest, largest = masked_range(torch.ones(shape), torch.zeros(shape, dtype=torch.bool))
    assert (smallest.item(), largest.item()) == (float("inf"), float("-inf"))


def test_last_masked_marks_the_last_true_position_and_nothing_in_an_empty_row():
    mask = torch.tensor([[False, True, True, False], [True, False, False, True], [False, False, False, False]])
    expected = [[False, False, True, False], [False, False, False, True], [False, False, False, False]]
    assert last_masked(mask).tolist() == expected


def test_last_masked_of_no_positions_is_empty():
    assert last_masked(torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0)


def test_row_mean_counts_true_positions_and_is_zero_for_none():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert row_mean(torch.tensor([[1.0, 0.0, 5.0], [0.0, 0.0, 0.0]]), mask).tolist() == [[3.0], [0.0]]
