"""Tests the properties of all policy losses that policy_losses.py documents."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.algorithms.policy_cases import (
    CASES,
    SEQUENCE,
    STOPPED_GRADIENT,
    Case,
    Columns,
    columns,
    gradient,
    take,
    with_gradient,
)
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EMPTY = {"no_rows": (0, 4), "no_positions": (3, 0)}


def with_masked_value(table: Columns, value: float) -> Columns:
    """Returns the table with this value at masked positions."""
    mask = table["mask"]
    return {
        name: column if column.dtype == torch.bool else column.masked_fill(~mask, value)
        for name, column in table.items()
    }


@every_loss
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e4])
def test_masked_tokens_change_neither_loss_nor_gradient_nor_metrics(case: Case, value: float):
    clean = columns(0)
    spoilt = with_masked_value(clean, value)
    assert_close(case(spoilt), case(clean), rtol=0, atol=0)
    assert_close(gradient(case, spoilt), gradient(case, clean), rtol=0, atol=0)


@every_loss
def test_loss_gradient_and_metrics_are_zero_where_the_mask_is_false(case: Case):
    table = with_masked_value(columns(1), 3.0)
    loss, metrics = case(table)
    outside = ~table["mask"]
    assert not any(x[outside].any() for x in (loss, gradient(case, table), *metrics.values()))


@every_loss
def test_permuting_rows_permutes_loss_and_metrics(case: Case):
    table, order = columns(2), [3, 0, 5, 1, 4, 2]
    loss, metrics = case(table)
    expected = (loss[order], {name: metric[order] for name, metric in metrics.items()})
    # A vectorised exponential may differ in its last digit from one of the few values at the end of a tensor.
    assert_norm_close(case(take(table, order)), expected, rtol=FLOAT64_RTOL)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite_in_value_and_gradient(case: Case, dtype: torch.dtype):
    far, ones = [-1e4, 1e4, -1e4, 1e4, -50.0, 50.0], [1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
    zeros = torch.zeros(2, 6, dtype=dtype)
    # The second row alone has a mean that is as extreme as its tokens.
    table = {
        "logprobs": torch.tensor([far, [1e4] * 6], dtype=dtype),
        "old_logprobs": zeros,
        "behavior_logprobs": zeros + 1e4,
        "advantages": torch.tensor([ones, [-1.0] * 6], dtype=dtype),
        "selected": torch.ones(2, 6, dtype=torch.bool),
        "mask": torch.ones(2, 6, dtype=torch.bool),
    }
    for sign in (1, -1):
        flipped = table | {"logprobs": sign * table["logprobs"]}
        loss, metrics = case(flipped)
        assert all(x.isfinite().all() for x in (loss, gradient(case, flipped), *metrics.values()))


@every_loss
def test_half_precision_gives_the_float32_result_of_the_rounded_inputs(case: Case):
    table = columns(3)
    low = {name: x if x.dtype == torch.bool else x.bfloat16() for name, x in table.items()}
    rounded = {name: x if x.dtype == torch.bool else x.bfloat16().float() for name, x in table.items()}
    assert case(low)[0].dtype == torch.float32
    assert_close(case(low), case(rounded), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.continuous])
def test_half_precision_inputs_change_a_continuous_loss_by_less_than_four_percent(name: str):
    """Two log-probabilities within 4 are off by 2^-9 * 4 each, 1.6 % of the ratio, and the advantage by 0.2 %."""
    case, table = CASES[name], columns(4)
    low = {name: x if x.dtype == torch.bool else x.bfloat16() for name, x in table.items()}
    assert_norm_close(case(low)[0].double(), case(table)[0], rtol=0.04)


@every_loss
def test_float32_agrees_with_float64(case: Case):
    table = columns(5)
    single = {name: x if x.dtype == torch.bool else x.float() for name, x in table.items()}
    rtol = reduction_rtol(torch.float32, length=table["mask"].shape[1], depth=8)
    assert_norm_close(case(single)[0].double(), case(table)[0], rtol)


@every_loss
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_an_empty_batch_gives_an_empty_loss(case: Case, shape: tuple[int, int]):
    loss, metrics = case(columns(6, *shape))
    assert loss.shape == shape and all(metric.shape == shape for metric in metrics.values())


@every_loss
def test_an_empty_mask_gives_zeros(case: Case):
    table = columns(7)
    table["mask"] = torch.zeros_like(table["mask"])
    loss, metrics = case(table)
    assert not any(x.any() for x in (loss, gradient(case, table), *metrics.values()))


@every_loss
def test_only_logprobs_receive_gradient_and_only_from_the_loss(case: Case):
    table = {name: x if x.dtype == torch.bool else x.requires_grad_() for name, x in columns(8).items()}
    loss, metrics = case(table)
    loss.sum().backward()
    assert table["logprobs"].grad is not None and table["logprobs"].grad.any()
    assert all(x.grad is None for name, x in table.items() if name != "logprobs")
    assert not any(metric.requires_grad for metric in metrics.values())


@every_loss
def test_ratio_and_approximate_divergence_are_reported_by_all(case: Case):
    table = columns(9)
    metrics = case(table)[1]
    log_ratios = (table["logprobs"] - table["old_logprobs"]).numpy()
    expected = np.where(table["mask"].numpy(), np.expm1(log_ratios) - log_ratios, 0)
    assert "ratio" in metrics
    assert_close(metrics["approx_kl"].numpy(), expected)
    assert_close(metrics["logprob_change"].numpy(), np.where(table["mask"].numpy(), np.abs(log_ratios), 0))


@every_loss
def test_clip_fractions_are_the_sum_of_low_and_high(case: Case):
    metrics = case(columns(10))[1]
    names = {name for name in metrics if name.startswith("clip_fraction")}
    assert names in (set(), {"clip_fraction", "clip_fraction_low", "clip_fraction_high"})
    if names:
        assert metrics["clip_fraction"].any()
        assert_close(metrics["clip_fraction"], metrics["clip_fraction_low"] + metrics["clip_fraction_high"])


def on_policy(seed: int) -> Columns:
    table = columns(seed)
    table |= dict.fromkeys(("old_logprobs", "behavior_logprobs"), table["logprobs"])
    table["selected"] = torch.zeros_like(table["selected"])
    table["advantages"] = table["advantages"][:, :1].expand_as(table["advantages"])
    return table


@every_loss
def test_on_policy_the_gradient_is_that_of_reinforce(case: Case):
    """One advantage per row: a ratio of the row hands the sum of its tokens' advantages to each of them."""
    table = on_policy(11)
    expected = torch.where(table["mask"], -table["advantages"], 0)
    assert_norm_close(gradient(case, table), expected, rtol=FLOAT64_RTOL)
    metrics = case(table)[1]
    assert_close(metrics["ratio"], table["mask"].double())
    assert not metrics["approx_kl"].any()


@pytest.mark.parametrize("name", sorted(set(CASES) - STOPPED_GRADIENT))
def test_the_gradient_agrees_with_finite_differences(name: str):
    table = columns(12)

    def loss(logprobs: Tensor) -> Tensor:
        return CASES[name](table | {"logprobs": logprobs})[0]

    assert torch.autograd.gradcheck(loss, (with_gradient(table)["logprobs"],))


@every_loss
def test_a_different_shape_is_rejected_by_name(case: Case):
    table = columns(14)
    for name in ("logprobs", "old_logprobs", "advantages", *case.columns):
        with pytest.raises(ValueError, match=rf"{name} .*\[6, 1\]"):
            case(table | {name: table[name][:, :1]})


@every_loss
def test_a_mask_that_is_not_bool_is_rejected(case: Case):
    table = columns(15)
    with pytest.raises(ValueError, match=r"mask .*torch.float64"):
        case(table | {"mask": table["mask"].double()})


@pytest.mark.parametrize("name", sorted(SEQUENCE))
def test_sequence_ratios_are_repeated_at_all_tokens(name: str):
    table = columns(16)
    ratio, mask = CASES[name](table)[1]["ratio"], table["mask"]
    for row in range(1, 6):
        assert len(ratio[row][mask[row]].unique()) == 1
