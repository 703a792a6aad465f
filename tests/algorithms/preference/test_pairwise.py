"""Preference losses against literals, formulas in NumPy, and finite differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import (
    aggregate,
    cpo_loss,
    dpo_loss,
    orpo_loss,
    pairwise_reward_loss,
    sequence_logprobs,
    simpo_loss,
)
from flowrl.algorithms.registry import reward_model_losses
from tests.engines.closeness import assert_norm_close

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def four_token_cpo(chosen: Tensor, rejected: Tensor, **settings: float) -> tuple[Tensor, dict[str, Tensor]]:
    """CPO of chosen responses with four tokens."""
    return cpo_loss(chosen, rejected, torch.full(chosen.shape, 4), beta=0.3, **settings)


LOSSES: dict[str, tuple[Loss, int]] = {
    "pairwise": (pairwise_reward_loss, 2),
    "pairwise, margin": (partial(pairwise_reward_loss, margin=0.7), 2),
    "sigmoid": (partial(dpo_loss, beta=0.3), 4),
    "cdpo": (partial(dpo_loss, beta=0.3, label_smoothing=0.1), 4),
    "hinge": (partial(dpo_loss, beta=0.3, kind="hinge"), 4),
    "ipo": (partial(dpo_loss, beta=0.3, kind="ipo"), 4),
    "simpo": (partial(simpo_loss, beta=2.0, margin=0.5), 2),
    "cpo": (partial(four_token_cpo, sft_coef=0.6), 2),
    "smoothed cpo": (partial(four_token_cpo, label_smoothing=0.1), 2),
    "orpo": (partial(orpo_loss, coef=0.4), 2),
}
"""Losses by name, with their number of arguments."""


def random_pairs(seed: int, count: int, pairs: int = 7) -> list[Tensor]:
    """Returns log-probabilities [P] of responses."""
    generator = torch.Generator().manual_seed(seed)
    return list(-4 * torch.rand((count, pairs), generator=generator, dtype=torch.float64) - 0.01)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.log1p(np.exp(-x))


def log_odds(x: np.ndarray) -> np.ndarray:
    return np.log(np.exp(x) / (1 - np.exp(x)))


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "pairwise": lambda c, r: np.log(1 + np.exp(r - c)),
    "pairwise, margin": lambda c, r: -log_sigmoid(c - r - 0.7),
    "sigmoid": lambda c, r, a, b: -log_sigmoid(0.3 * (c - a) - 0.3 * (r - b)),
    "cdpo": lambda c, r, a, b: -0.9 * log_sigmoid(0.3 * (c - a - r + b)) - 0.1 * log_sigmoid(-0.3 * (c - a - r + b)),
    "hinge": lambda c, r, a, b: np.maximum(0, 1 - 0.3 * (c - a - r + b)),
    "ipo": lambda c, r, a, b: (np.log(np.exp(c - a) / np.exp(r - b)) - 1 / 0.6) ** 2,
    "simpo": lambda c, r: -log_sigmoid(2 * c - 2 * r - 0.5),
    "cpo": lambda c, r: -log_sigmoid(0.3 * (c - r)) - 0.6 * c / 4,
    "smoothed cpo": lambda c, r: -0.9 * log_sigmoid(0.3 * (c - r)) - 0.1 * log_sigmoid(-0.3 * (c - r)) - c / 4,
    "orpo": lambda c, r: -c - 0.4 * log_sigmoid(log_odds(c) - log_odds(r)),
}


def test_sequence_logprobs_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [float("nan"), -0.5, -0.25], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    assert sequence_logprobs(logprobs, mask, mode="sum").tolist() == [-7.0, -0.75, 0.0]
    assert_close(sequence_logprobs(logprobs, mask, mode="mean"), torch.tensor([-7 / 3, -0.375, 0.0]))


def test_sequence_logprobs_have_the_gradient_of_a_masked_sum_or_mean():
    logprobs = torch.full((1, 3), -1.0).masked_fill(torch.tensor([[False, True, False]]), float("inf")).requires_grad_()
    mask = torch.tensor([[True, False, True]])
    actual = [
        torch.autograd.grad(sequence_logprobs(logprobs, mask, mode=m).sum(), logprobs)[0] for m in ("sum", "mean")
    ]
    assert actual[0].tolist() == [[1.0, 0.0, 1.0]] and actual[1].tolist() == [[0.5, 0.0, 0.5]]


def test_the_pairwise_loss_by_hand():
    # Differences 0, 2, -2: ln 2, ln(1 + e^-2), ln(1 + e^2).
    loss, metrics = pairwise_reward_loss(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, 2.0]))
    assert_close(loss, torch.tensor([0.6931472, 0.1269280, 2.1269280]))
    assert metrics["accuracy"].tolist() == [0, 1, 0]
    assert metrics["margin"].tolist() == [0, 2, -2]


def test_a_margin_per_pair_shifts_the_difference_and_receives_no_gradient():
    margin = torch.tensor([2.0, 0.0], requires_grad=True)
    chosen = torch.tensor([3.0, 3.0], requires_grad=True)
    loss, _ = pairwise_reward_loss(chosen, torch.ones(2), margins=margin)
    assert_close(loss, torch.tensor([0.6931472, 0.1269280]))
    loss.sum().backward()
    assert margin.grad is None and chosen.grad is not None


def test_log_sig_and_log_exp_are_one_function_which_is_finite_at_large_gaps():
    assert {reward_model_losses.load(name) for name in ("log_sig", "log_exp")} == {pairwise_reward_loss}
    loss, _ = pairwise_reward_loss(torch.tensor([0.0]), torch.tensor([90.0]))
    assert loss.tolist() == [90.0]


def test_dpo_by_hand():
    # Chosen ratio 1, rejected ratio -1, so h = 2 and beta h = 1.
    pairs = [torch.tensor([x]) for x in (-4.0, -6.0, -5.0, -5.0)]
    loss, metrics = dpo_loss(*pairs, beta=0.5)
    assert_close(loss, torch.tensor([0.3132617]))
    assert {name: value.item() for name, value in metrics.items()} == {
        "accuracy": 1.0,
        "chosen_reward": 0.5,
        "rejected_reward": -0.5,
        "margin": 1.0,
    }
    # 0.8 ln(1 + e^-1) + 0.2 ln(1 + e)
    assert_close(dpo_loss(*pairs, beta=0.5, label_smoothing=0.2)[0], torch.tensor([0.5132617]))
    assert dpo_loss(*pairs, beta=0.25, kind="hinge")[0].tolist() == [0.5]
    assert dpo_loss(*pairs, beta=0.5, kind="ipo")[0].tolist() == [1.0]


def test_simpo_by_hand():
    # 2 (-1) - 2 (-1.5) - 1 = 0
    loss, metrics = simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), beta=2.0, margin=1.0)
    assert_close(loss, torch.tensor([0.6931472]))
    assert metrics["accuracy"].item() == 1 and metrics["chosen_reward"].item() == -2


def test_orpo_by_hand():
    # P = 1/2 and 1/4: odds 1 and 1/3, and -log sigmoid(ln 3) = -ln(3/4).
    chosen, rejected = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    loss, metrics = orpo_loss(chosen, rejected, coef=0.1)
    assert_close(loss, torch.tensor([0.6931472 + 0.1 * 0.2876821]))
    assert_close(metrics["sft_loss"], torch.tensor([0.6931472]))
    assert_close(metrics["odds_ratio_loss"], torch.tensor([0.2876821]))
    assert_close(metrics["margin"], torch.tensor([1.0986123]))


def test_cpo_by_hand():
    # 0.1 (-2 + 12) = 1: ln(1 + e^-1), and a cross-entropy of 1 per token.
    loss, metrics = cpo_loss(torch.tensor([-2.0]), torch.tensor([-12.0]), torch.tensor([2]), beta=0.1, sft_coef=0.5)
    assert_close(loss, torch.tensor([0.3132617 + 0.5]))
    assert_close(metrics["sft_loss"], torch.tensor([1.0]))
    assert_close(metrics["margin"], torch.tensor([1.0]))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_agrees_with_its_formula_in_numpy(name: str):
    loss, count = LOSSES[name]
    pairs = random_pairs(0, count)
    assert_norm_close(loss(*pairs)[0], torch.as_tensor(FORMULAS[name](*[x.numpy() for x in pairs])))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_passes_a_gradient_check(name: str):
    loss, count = LOSSES[name]
    pairs = random_pairs(1, count)
    trained = [x.requires_grad_() for x in pairs[:2]]
    assert torch.autograd.gradcheck(lambda c, r: loss(c, r, *pairs[2:])[0], trained)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_differences_stay_finite_in_value_and_gradient(name: str, gap: float):
    loss, count = LOSSES[name]
    chosen, rejected = (torch.tensor([x], requires_grad=True) for x in (min(0.0, gap), min(0.0, -gap)))
    value, metrics = loss(chosen, rejected, *[torch.zeros(1)] * (count - 2))
    actual = torch.autograd.grad(value.sum(), (chosen, rejected))
    assert all(x.isfinite().all() for x in (value, *actual, *metrics.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_permuting_or_slicing_pairs_permutes_or_slices_the_loss(name: str):
    loss, count = LOSSES[name]
    pairs, order = random_pairs(2, count), torch.tensor([4, 0, 6])
    full, part = loss(*pairs), loss(*[x[order] for x in pairs])
    assert_norm_close(part, (full[0][order], {key: value[order] for key, value in full[1].items()}))


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_is_float32_inside_and_an_empty_batch_is_empty(name: str):
    loss, count = LOSSES[name]
    pairs = [x.bfloat16() for x in random_pairs(3, count)]
    assert_close(loss(*pairs), loss(*[x.float() for x in pairs]), rtol=0, atol=0)
    value, metrics = loss(*[x[:0] for x in pairs])
    assert all(x.shape == (0,) and x.dtype == torch.float32 for x in (value, *metrics.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_and_references_have_no_gradient(name: str):
    loss, count = LOSSES[name]
    pairs = [x.requires_grad_() for x in random_pairs(4, count)]
    value, metrics = loss(*pairs)
    value.sum().backward()
    assert not any(x.requires_grad for x in metrics.values())
    assert all(x.grad is None for x in pairs[2:])


@given(seed=st.integers(0, 2**16), split=st.integers(0, 6), mode=st.sampled_from(["sum", "mean"]))
@settings(max_examples=20, deadline=None)
def test_any_split_from_tokens_to_loss_sums_to_the_full_batch(seed: int, split: int, mode: Any):
    generator = torch.Generator().manual_seed(seed)
    tokens = -torch.rand((2, 6, 5), generator=generator, dtype=torch.float64).requires_grad_()
    masks = torch.rand((2, 6, 5), generator=generator) < 0.6

    def share(rows: slice) -> Tensor:
        chosen, rejected = (sequence_logprobs(tokens[i, rows], masks[i, rows], mode=mode) for i in (0, 1))
        loss, _ = simpo_loss(chosen, rejected, beta=2.0, margin=0.5)
        every = torch.ones(len(loss), 1, dtype=torch.bool)
        return aggregate(loss[:, None], every, mode="token_mean", denominator=6)

    full, parts = share(slice(None)), share(slice(0, split)) + share(slice(split, None))
    assert_norm_close(parts, full)
    assert_norm_close(torch.autograd.grad(parts, tokens), torch.autograd.grad(full, tokens))


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dpo_loss(ONE, ONE, ONE, ONE, beta=0.0), r"beta .*0\.0"),
        (lambda: dpo_loss(ONE, ONE, ONE, ONE, beta=0.1, kind="exo"), r"'exo'"),  # pyright: ignore
        (lambda: dpo_loss(ONE, ONE, ONE, ONE, beta=0.1, label_smoothing=0.5), r"label_smoothing .*0\.5"),
        (lambda: dpo_loss(ONE, ONE, ONE, ONE, beta=1, kind="ipo", label_smoothing=0.1), r"label_smoothing .*0\.1"),
        (lambda: dpo_loss(ONE, ONE, ONE[:0], ONE, beta=0.1), r"ref_chosen_logprobs .*\[0\]"),
        (lambda: cpo_loss(ONE, ONE, ONE, beta=0.1, sft_coef=-1.0), r"sft_coef .*-1\.0"),
        (lambda: simpo_loss(ONE, ONE, beta=2.0, margin=-1.0), r"margin .*-1\.0"),
        (lambda: orpo_loss(ONE, ONE, coef=-0.1), r"coef .*-0\.1"),
        (lambda: pairwise_reward_loss(ONE, ONE, margin=-1.0), r"margin .*-1\.0"),
        (lambda: pairwise_reward_loss(ONE[None], ONE[None]), r"chosen_scores .*\[1, 1\]"),
        (lambda: sequence_logprobs(ONE[None], ONE[None] > 0, mode="max"), r"mode .*'max'"),  # pyright: ignore
    ],
)
def test_misuse_is_rejected(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        call()
