"""The value loss against literals, a NumPy formula and finite differences; explained variance."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import aggregate, clipped_value_loss, explained_variance
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close

ONES = torch.ones(1, 4, dtype=torch.bool)


def random_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns values (requiring gradient), old_values, returns, mask."""
    generator = torch.Generator().manual_seed(seed)
    values, old_values, returns = torch.randn(3, 5, 9, generator=generator, dtype=torch.float64)
    return values.requires_grad_(), old_values, returns, torch.rand(5, 9, generator=generator) < 0.6


def test_the_loss_by_hand():
    # Clipped to 0.2 around the old values, these are 0.2, 0.2, 0.1, -0.2; the larger error counts.
    values, old_values = torch.tensor([[1.0, 1.0, 0.1, -1.0]]), torch.zeros(1, 4)
    returns = torch.tensor([[1.0, 0.0, 0.5, -2.0]])
    loss, clip_fraction = clipped_value_loss(values, old_values, returns, ONES, clip=0.2)
    assert_close(loss, torch.tensor([[0.32, 0.5, 0.08, 1.62]]))
    assert clip_fraction.tolist() == [[1, 0, 0, 1]]


def test_the_gradient_computed_by_hand_is_zero_where_the_clip_binds():
    values = torch.tensor([[1.0, 1.0, 0.1, -1.0]], requires_grad=True)
    returns = torch.tensor([[1.0, 0.0, 0.5, -2.0]])
    loss, _ = clipped_value_loss(values, torch.zeros(1, 4), returns, ONES, clip=0.2)
    assert_close(torch.autograd.grad(loss.sum(), values)[0], torch.tensor([[0.0, 1.0, -0.4, 0.0]]))


def test_without_a_clip_the_loss_is_half_the_squared_error():
    values, old_values, returns, mask = random_inputs(0)
    loss, clip_fraction = clipped_value_loss(values, old_values, returns, mask, clip=None)
    assert_norm_close(loss, torch.where(mask, 0.5 * (values - returns) ** 2, 0), rtol=FLOAT64_RTOL)
    assert not clip_fraction.any()


def test_the_loss_agrees_with_the_formula_in_numpy():
    values, old_values, returns, mask = random_inputs(1)
    loss, _ = clipped_value_loss(values, old_values, returns, mask, clip=0.3)
    v, v_old, r = values.detach().numpy(), old_values.numpy(), returns.numpy()
    expected = 0.5 * np.maximum((v - r) ** 2, (np.clip(v, v_old - 0.3, v_old + 0.3) - r) ** 2)
    assert_close(loss.detach().numpy(), np.where(mask, expected, 0.0))


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_loss_passes_a_gradient_check(clip: float | None):
    values, old_values, returns, mask = random_inputs(2)
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old_values, returns, mask, clip=clip)[0], (values,))


def test_masked_tokens_change_neither_loss_nor_gradient():
    values, old_values, returns, mask = random_inputs(3)
    clean = clipped_value_loss(values, old_values, returns, mask, clip=0.3)
    dirty_values = values.detach().masked_fill(~mask, float("nan")).requires_grad_()
    dirty = clipped_value_loss(
        dirty_values,
        old_values.masked_fill(~mask, float("nan")),
        returns.masked_fill(~mask, float("inf")),
        mask,
        clip=0.3,
    )
    assert_close(dirty, clean, rtol=0, atol=0)
    assert_close(*torch.autograd.grad(clean[0].sum() + dirty[0].sum(), (values, dirty_values)), rtol=0, atol=0)


def test_no_gradient_flows_into_the_targets():
    values, old_values, returns, mask = random_inputs(4)
    loss, _ = clipped_value_loss(values, old_values.requires_grad_(), returns.requires_grad_(), mask, clip=0.3)
    loss.sum().backward()
    assert old_values.grad is None and returns.grad is None


def test_a_clip_that_is_not_above_zero_is_rejected():
    with pytest.raises(ValueError, match=r"clip .*0\.0"):
        clipped_value_loss(*random_inputs(5), clip=0.0)


def test_permuting_rows_permutes_the_loss_and_a_split_sums_to_the_same_gradient():
    values, old_values, returns, mask = random_inputs(9)
    parts = [
        aggregate(
            clipped_value_loss(values[rows], old_values[rows], returns[rows], mask[rows], clip=0.3)[0],
            mask[rows],
            mode="token_mean",
            denominator=mask.sum(),
        )
        for rows in ([3, 0], [1, 4, 2], [0, 1, 2, 3, 4])
    ]
    assert_norm_close(parts[0] + parts[1], parts[2], rtol=FLOAT64_RTOL)
    assert_norm_close(*(torch.autograd.grad(x, values)[0] for x in (parts[0] + parts[1], parts[2])), rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_large_errors_have_finite_loss_and_gradient(clip: float | None):
    values = torch.tensor([[1e4, -1e4, 1e4, 0.0]], requires_grad=True)
    returns = torch.tensor([[-1e4, 1e4, 1e4, -1e4]])
    loss, _ = clipped_value_loss(values, torch.zeros(1, 4), returns, ONES, clip=clip)
    assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), values)[0].isfinite().all()


def test_bfloat16_values_are_computed_in_float32():
    values, old_values, returns, mask = random_inputs(10)
    v, v_old, r = (x.detach().bfloat16() for x in (values, old_values, returns))
    actual = clipped_value_loss(v, v_old, r, mask, clip=0.3), explained_variance(v, r, mask)
    v, v_old, r = v.float(), v_old.float(), r.float()
    expected = clipped_value_loss(v, v_old, r, mask, clip=0.3), explained_variance(v, r, mask)
    assert_close(actual, expected, rtol=0, atol=0)


def test_empty_masks_and_empty_batches_give_zeros():
    values, old_values, returns, mask = random_inputs(11)
    loss, clip_fraction = clipped_value_loss(values, old_values, returns, torch.zeros_like(mask), clip=0.3)
    assert not loss.any() and not clip_fraction.any()
    assert not torch.autograd.grad(loss.sum(), values)[0].any()
    none = torch.zeros(0, 4)
    assert clipped_value_loss(none, none, none, none.bool(), clip=0.3)[0].shape == (0, 4)
    assert explained_variance(none, none, none.bool()).item() == 0.0


def test_explained_variance_agrees_with_numpy():
    values, _, returns, mask = random_inputs(12)
    targets, predicted = returns[mask].numpy(), values.detach()[mask].numpy()
    assert_close(explained_variance(values, returns, mask).item(), 1 - np.var(targets - predicted) / np.var(targets))


def test_explained_variance_by_hand():
    # returns 1, 2, 3, 6: variance 14 / 4; errors 0, 0, 1, 1: variance 1 / 4
    returns, values = torch.tensor([[1.0, 2.0, 3.0, 6.0]]), torch.tensor([[1.0, 2.0, 2.0, 5.0]])
    assert_close(explained_variance(values, returns, ONES), torch.tensor(1 - 1 / 14))


def test_explained_variance_is_one_for_perfect_values_up_to_a_shift_and_zero_for_a_constant():
    _, _, returns, mask = random_inputs(6)
    assert_close(explained_variance(returns + 3, returns, mask).item(), 1.0)
    assert_close(explained_variance(torch.full_like(returns, 2.0), returns, mask).item(), 0.0)


def test_explained_variance_ignores_masked_tokens():
    values, _, returns, mask = random_inputs(7)
    clean = explained_variance(values, returns, mask)
    dirty = explained_variance(values.masked_fill(~mask, float("nan")), returns.masked_fill(~mask, 1e9), mask)
    assert clean.equal(dirty)


def test_explained_variance_of_constant_returns_or_an_empty_mask_is_zero():
    values, _, returns, mask = random_inputs(8)
    assert explained_variance(values, torch.ones_like(returns), mask).item() == 0.0
    assert explained_variance(values, returns, torch.zeros_like(mask)).item() == 0.0
