"""Tests all functions: NumPy formulas, permutation of rows, masks, precision and empty batches."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl import algorithms as a
from flowrl.algorithms import KlKind
from tests.algorithms.policy_cases import CASES as LOSSES
from tests.algorithms.policy_cases import STOPPED_GRADIENT, gradient
from tests.algorithms.property_cases import CASES, ROWS_ALONE, UNORDERED, Columns, columns
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

every_case = pytest.mark.parametrize("name", CASES)
masking = pytest.mark.parametrize("name", [name for name, case in CASES.items() if "mask" in case.inputs])


def converted(table: Columns, dtype: torch.dtype) -> Columns:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in table.items()}


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_function_agrees_with_its_formula_in_numpy(name: str, seed: int):
    table = columns(seed)
    expected = CASES[name].formula({key: x.numpy() for key, x in table.items()})
    for actual, target in zip(
        CASES[name](table), expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        rtol = FLOAT64_RTOL if actual.dtype == torch.float64 else reduction_rtol(torch.float32, length=7, depth=1)
        assert_norm_close(actual.double(), torch.as_tensor(target, dtype=torch.float64), rtol)


@every_case
def test_permuting_rows_permutes_results(name: str):
    table, order = columns(3), torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = {key: x if key == "weight" else x[order] for key, x in table.items()}
    for actual, full in zip(CASES[name](permuted), CASES[name](table), strict=True):
        assert_norm_close(actual, full if name in UNORDERED else full[order])


@masking
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_masked_tokens_change_nothing(name: str, value: float):
    table = columns(4)
    tokens = {key: x for key, x in table.items() if x.is_floating_point() and x.shape == table["mask"].shape}
    spoilt = table | {key: x.masked_fill(~table["mask"], value) for key, x in tokens.items()}
    # The hidden state before a token determines its log-probability.
    target = torch.nn.functional.pad(table["mask"][:, 1:], (0, 1))
    spoilt["hidden"] = table["hidden"].masked_fill(~target[..., None], value)
    assert_close(CASES[name](spoilt), CASES[name](table), rtol=0, atol=0)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_ten_thousand_stay_finite(name: str, dtype: torch.dtype):
    table = columns(5)
    for seed in range(4):
        draws = torch.Generator().manual_seed(seed)
        far = {
            key: 1e4 * (torch.randint(0, 3, x.shape, generator=draws) - 1.0)
            for key, x in table.items()
            if x.is_floating_point() and key not in ("weight", "hidden")
        }
        extreme = converted(table | far, dtype)
        extreme["hidden"] = 1e4 * extreme["hidden"].sign()
        for actual in CASES[name](extreme):
            # The correlation with a constant is undefined.
            assert actual[~actual.isnan() if name == "mismatch_metrics" else ...].isfinite().all()


@every_case
def test_half_precision_gives_the_float32_result_of_the_rounded_inputs(name: str):
    low = converted(columns(6), torch.bfloat16)
    rounded = converted(low, torch.float32)
    for actual, expected in zip(CASES[name](low), CASES[name](rounded), strict=True):
        assert actual.dtype in (torch.float32, torch.float64)
        if "hidden" in CASES[name].inputs:
            # The logits of a head are rounded to its dtype, as in the model.
            assert_norm_close(actual, expected, reduction_rtol(torch.bfloat16, length=1, depth=2))
        else:
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in CASES for s in ((0, 4), (0, 0), (3, 0)) if s[0] == 0 or n not in ROWS_ALONE]
)
def test_an_empty_batch_is_defined(name: str, shape: tuple[int, int]):
    table = columns(7, *shape)
    for actual in CASES[name](table):
        if name in UNORDERED:
            # Empty means are NaN; empty sums and maxima are 0.
            assert (actual.isnan() | (actual == 0)).all()
        else:
            assert actual.shape[:1] == shape[:1] and not actual.any()


@masking
def test_an_empty_mask_gives_zeros(name: str):
    table = columns(8)
    table["mask"] = torch.zeros_like(table["mask"])
    for actual in CASES[name](table):
        assert (actual.isnan() | (actual == 0)).all() if name in UNORDERED else not actual.any()


def central_difference(function, at: Tensor, step: float = 1e-6) -> Tensor:
    """Returns the central difference of the summed result, entry by entry."""
    actual = torch.zeros_like(at)
    for index in np.ndindex(*at.shape):
        ahead, behind = at.clone(), at.clone()
        ahead[index] += step
        behind[index] -= step
        actual[index] = (function(ahead).sum() - function(behind).sum()) / (2 * step)
    return actual


@pytest.mark.parametrize("name", sorted(STOPPED_GRADIENT))
def test_gradient_agrees_with_a_finite_difference_with_constant_weight(name: str):
    """GSPO-token and DPPO are their ratio in value; CISPO's weight stands still where both policies move together."""
    case, table = LOSSES[name], columns(12)
    table["advantages"] = table["advantages"][:, :1].expand_as(table["advantages"]).clone()

    def loss(logprobs: Tensor) -> Tensor:
        together = {"old_logprobs": table["old_logprobs"] + logprobs - table["logprobs"]} if name == "cispo" else {}
        return case(table | together | {"logprobs": logprobs})[0]

    actual, expected = gradient(case, table), central_difference(loss, table["logprobs"])
    # Where max_ratio binds the value stands still, and the gradient is the weight's.
    bound = case(table)[1].get("max_ratio_fraction", torch.zeros_like(actual)) > 0
    assert actual[~bound].count_nonzero() > 8
    assert_norm_close(actual[~bound], expected[~bound], rtol=1e-6)
    assert_norm_close(actual[bound], case(table)[0][bound])


@pytest.mark.parametrize("kind", get_args(KlKind))
@pytest.mark.parametrize("through", get_args(KlKind))
def test_straight_through_has_the_gradient_of_a_finite_difference_of_the_other_estimator(kind: KlKind, through: KlKind):
    table = columns(13)
    reference = table["old_logprobs"]
    logprobs = table["logprobs"].clone().requires_grad_()
    (actual,) = torch.autograd.grad(a.kl_estimate(logprobs, reference, kind=kind, gradient=through).sum(), logprobs)
    expected = central_difference(lambda x: a.kl_estimate(x, reference, kind=through), logprobs.detach())
    assert_norm_close(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("gradient_kind", get_args(KlKind))
def test_straight_through_is_finite_at_extreme_log_ratios(gradient_kind: KlKind):
    logprobs = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss, _ = a.kl_loss(logprobs, -logprobs, torch.ones(1, 3).bool(), kind="k3", gradient=gradient_kind)
    assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), logprobs)[0].isfinite().all()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("sequence_logprobs", "aggregate"))])
def test_sums_of_tokens_pass_a_gradient_check(name: str):
    table = columns(14)
    key = CASES[name].inputs[0]
    assert torch.autograd.gradcheck(lambda x: CASES[name](table | {key: x})[0], table[key].clone().requires_grad_())


def test_normalized_weights_by_hand():
    mask = torch.tensor([[True, False], [True, True]])
    actual = a.normalized_weights(torch.tensor([[1.0, 9.0], [3.0, 2.0]]), mask, mean=2.0)
    assert actual.tolist() == [[0.5, 0.0], [1.5, 1.0]]
