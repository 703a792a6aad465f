"""Tests aggregation with literals, and that any split sums to the full batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import AggregationMode, aggregate, masked_range
from tests.algorithms.policy_cases import CASES, Case, Columns, columns, take, with_gradient
from tests.algorithms.unbounded import aggregation_count
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close

MODES: list[AggregationMode] = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [9.0, 8.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True, False], [False, True, False, False], [False, False, False, False]])


def step_loss(loss: Tensor, mask: Tensor, mode: AggregationMode, parts: list[list[int]]) -> Tensor:
    """Returns the loss of one optimizer step whose rows are split into these parts."""
    scale = 10.0 if mode == "seq_mean_token_sum_norm" else None
    denominator = sum(int(aggregation_count(mask[rows], mode=mode)) for rows in parts)
    shares = [aggregate(loss[rows], mask[rows], mode=mode, denominator=denominator, scale=scale) for rows in parts]
    return torch.stack(shares).sum()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 14 / 4),
        ("seq_mean_token_sum", 14 / 2),
        ("seq_mean_token_mean", (2 + 8) / 2),
        ("seq_mean_token_sum_norm", 14 / (2 * 10)),
    ],
)
def test_aggregate_by_hand(mode: AggregationMode, expected: float):
    assert_close(step_loss(LOSS, MASK, mode, [[0, 1, 2]]), torch.tensor(expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2], [3, 4, 5]], [[5], [0, 3], [], [1, 4, 2]], [[0], [1], [2], [3], [4], [5]]]
)
def test_any_split_gives_the_loss_and_gradient_of_the_full_batch(mode: AggregationMode, parts: list[list[int]]):
    generator = torch.Generator().manual_seed(0)
    loss = torch.randn(6, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(6, 7, generator=generator) < torch.tensor([0.0, 0.2, 0.5, 0.6, 0.9, 1.0])[:, None]
    full = step_loss(loss, mask, mode, [[0, 1, 2, 3, 4, 5]])
    split = step_loss(loss, mask, mode, parts)
    assert_norm_close(split, full, rtol=FLOAT64_RTOL)
    assert_norm_close(torch.autograd.grad(split, loss), torch.autograd.grad(full, loss), rtol=FLOAT64_RTOL)


@st.composite
def splits(draw: st.DrawFn, num_rows: int) -> list[list[list[int]]]:
    """Draws splits of rows into ranks and micro-batches, in any order; both may be empty."""
    order = draw(st.permutations(range(num_rows)))
    num_ranks, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    homes = draw(st.lists(st.integers(0, num_ranks * num_micro_batches - 1), min_size=num_rows, max_size=num_rows))
    parts = [[row for row, home in zip(order, homes, strict=True) if home == part] for part in range(max(homes) + 1)]
    return [parts[start : start + num_micro_batches] for start in range(0, len(parts), num_micro_batches)]


def share(case: Case, table: Columns, rows: list[int], mode: AggregationMode, denominator: int) -> Tensor:
    part = take(table, rows)
    scale = 7.0 if mode == "seq_mean_token_sum_norm" else None
    return aggregate(case(part)[0], part["mask"], mode=mode, denominator=denominator, scale=scale)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), mode=st.sampled_from(MODES), ranks=splits(6))
def test_any_split_into_ranks_and_micro_batches_gives_every_loss_and_its_gradient(
    case: Case, seed: int, mode: AggregationMode, ranks: list[list[list[int]]]
):
    table = with_gradient(columns(seed))
    denominator = int(aggregation_count(table["mask"], mode=mode))
    full = share(case, table, list(range(6)), mode, denominator)
    total, expected = torch.zeros_like(full), torch.autograd.grad(full, table["logprobs"])[0]
    gradient = torch.zeros_like(expected)
    for rank in ranks:
        for rows in rank:
            part = share(case, table, rows, mode, denominator)
            gradient += torch.autograd.grad(part, table["logprobs"])[0]
            total += part.detach()
    assert_norm_close(total, full.detach(), rtol=FLOAT64_RTOL)
    assert_norm_close(gradient, expected, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), ranks=splits(6))
def test_any_split_gives_every_metric_its_mean_and_the_ratio_its_range(
    case: Case, seed: int, ranks: list[list[list[int]]]
):
    table = columns(seed)
    parts = [take(table, rows) for rank in ranks for rows in rank]
    reports = [case(part)[1] for part in parts]
    full = case(table)[1]
    for name, metric in full.items():
        assert_norm_close(
            torch.stack([report[name].sum() for report in reports]).sum(), metric.sum(), rtol=FLOAT64_RTOL
        )
    ranges = [masked_range(report["ratio"], part["mask"]) for report, part in zip(reports, parts, strict=True)]
    smallest, largest = masked_range(full["ratio"], table["mask"])
    assert min(low.item() for low, _ in ranges) == pytest.approx(smallest.item(), rel=1e-12)
    assert max(high.item() for _, high in ranges) == pytest.approx(largest.item(), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_change_neither_loss_nor_gradient(mode: AggregationMode):
    dirty = LOSS.masked_fill(~MASK, float("nan")).requires_grad_()
    total = step_loss(dirty, MASK, mode, [[0, 1, 2]])
    assert_norm_close(total, step_loss(LOSS, MASK, mode, [[0, 1, 2]]), rtol=FLOAT64_RTOL)
    (gradient,) = torch.autograd.grad(total, dirty)
    assert gradient[MASK].all() and not gradient[~MASK].any()


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_passes_a_gradient_check(mode: AggregationMode):
    loss = LOSS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: step_loss(x, MASK, mode, [[0, 1, 2]]), (loss,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", [0, torch.tensor(0)])
def test_a_step_without_tokens_has_the_loss_zero_and_the_gradient_zero(
    mode: AggregationMode, denominator: int | Tensor
):
    loss, scale = LOSS.clone().requires_grad_(), 10.0 if mode == "seq_mean_token_sum_norm" else None
    total = aggregate(loss, torch.zeros_like(MASK), mode=mode, denominator=denominator, scale=scale)
    total.backward()
    assert total.item() == 0 and loss.grad is not None and not loss.grad.any()


def test_the_denominator_may_be_a_tensor():
    assert_close(aggregate(LOSS, MASK, mode="token_mean", denominator=torch.tensor(4)), torch.tensor(3.5))


def test_an_unknown_mode_is_rejected():
    with pytest.raises(ValueError, match=r"mode .*'mean'"):
        aggregate(LOSS, MASK, mode="mean", denominator=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("scale", [None, 0.0])
def test_the_norm_mode_needs_a_scale(scale: float | None):
    with pytest.raises(ValueError, match="scale"):
        aggregate(LOSS, MASK, mode="seq_mean_token_sum_norm", denominator=2, scale=scale)


def test_a_scale_for_another_mode_is_rejected():
    with pytest.raises(ValueError, match=r"scale .*10\.0"):
        aggregate(LOSS, MASK, mode="token_mean", denominator=4, scale=10.0)


def test_a_negative_denominator_is_rejected():
    with pytest.raises(ValueError, match=r"denominator .*-1"):
        aggregate(LOSS, MASK, mode="token_mean", denominator=-1)
