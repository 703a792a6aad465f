"""Tests selection and losses of Clip-Cov and KL-Cov with literals and NumPy formulas."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov, token_covariances
from tests.algorithms.policy_cases import columns

OLD = torch.full((1, 4), -1.0)
RATIOS = torch.tensor([[2.0, 0.5, 2.0, 1.1]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0, -2.0]])
SELECTED = torch.tensor([[True, True, False, False]])
MASK = torch.ones(1, 4, dtype=torch.bool)
COVARIANCES = torch.tensor([[2.0, 9.0, 0.5, 3.0], [1.0, 5.0, 7.0, 99.0]])
RANKED = torch.tensor([[True, True, True, True], [True, True, True, False]])


def moved() -> Tensor:
    return (OLD + RATIOS.log()).requires_grad_()


def test_covariances_by_hand():
    """Means -2 and 1 over the three tokens that count."""
    logprobs, advantages = torch.tensor([[-1.0, -2.0], [-3.0, 7.0]]), torch.tensor([[3.0, 0.0], [0.0, 8.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert token_covariances(logprobs, advantages, mask).tolist() == [[2.0, 0.0], [1.0, 0.0]]


def test_covariances_agree_with_numpy_and_have_the_covariance_as_their_mean():
    table = columns(0)
    mask, x, a = (table[name].numpy() for name in ("mask", "logprobs", "advantages"))
    got = token_covariances(table["logprobs"], table["advantages"], table["mask"]).numpy()
    assert_close(got, np.where(mask, (x - x[mask].mean()) * (a - a[mask].mean()), 0.0))
    assert got[mask].mean() == pytest.approx(np.cov(x[mask], a[mask], ddof=0)[0, 1])


def test_masked_tokens_change_no_covariance_and_equal_advantages_give_zero():
    table = columns(1)
    mask = table["mask"]
    spoilt = table["logprobs"].masked_fill(~mask, float("nan")), table["advantages"].masked_fill(~mask, float("inf"))
    clean = token_covariances(table["logprobs"], table["advantages"], mask)
    assert_close(token_covariances(*spoilt, mask), clean, rtol=0, atol=0)
    assert not token_covariances(table["logprobs"], torch.full_like(clean, 2.0), mask).any()


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, []), (0.28, [9.0]), (3 / 7, [9.0, 7.0, 5.0]), (1.0, [9.0, 7.0, 5.0, 3, 2, 1, 0.5])]
)
def test_kl_cov_selects_the_largest_covariances_rounded_down(fraction: float, expected: list[float]):
    selected = select_kl_cov(COVARIANCES, RANKED, fraction=fraction)
    assert sorted(COVARIANCES[selected].tolist(), reverse=True) == expected


def test_kl_cov_selects_no_masked_tokens():
    spoilt = COVARIANCES.masked_fill(~RANKED, float("nan"))
    assert select_kl_cov(spoilt, RANKED, fraction=1.0).equal(RANKED)


def test_permuting_rows_permutes_the_selection_of_kl_cov():
    table, order = columns(2), [4, 2, 0, 5, 3, 1]
    covariances = token_covariances(table["logprobs"], table["advantages"], table["mask"])
    selected = select_kl_cov(covariances, table["mask"], fraction=0.3)
    assert selected.any()
    assert select_kl_cov(covariances[order], table["mask"][order], fraction=0.3).equal(selected[order])


def test_clip_cov_samples_within_its_range():
    selected = select_clip_cov(COVARIANCES, RANKED, fraction=1.0, low=1.0, high=5.0, seed=0)
    assert sorted(COVARIANCES[selected].tolist()) == [1.0, 2.0, 3.0, 5.0]


def test_clip_cov_samples_uniformly_and_reproducibly():
    counts = torch.zeros_like(COVARIANCES)
    for seed in range(400):
        selected = select_clip_cov(COVARIANCES, RANKED, fraction=0.3, low=1.0, high=5.0, seed=seed)
        assert selected.sum() == 2
        counts += selected
    again = select_clip_cov(COVARIANCES, RANKED, fraction=0.3, low=1.0, high=5.0, seed=399)
    assert again.equal(selected)
    # 400 draws of 2 out of 4: 200 each, with a standard deviation of 10.
    assert counts[counts > 0].tolist() == pytest.approx([200] * 4, abs=45)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_a_batch_without_tokens_has_no_selection(shape: tuple[int, int]):
    mask, values = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    assert token_covariances(values, values, mask).equal(values)
    assert select_kl_cov(values, mask, fraction=1.0).equal(mask)
    assert select_clip_cov(values, mask, fraction=1.0, low=-1, high=1, seed=0).equal(mask)


def test_a_fraction_that_is_an_integer_number_of_tokens_is_not_rounded_down():
    mask = torch.ones(1, 100, dtype=torch.bool)
    assert select_kl_cov(torch.arange(100.0)[None], mask, fraction=0.29).sum() == 29


def test_clip_cov_by_hand():
    """PPO would give -1.3 (clipped), -0.5, -1.3 (clipped) and 2.2; the first two are selected."""
    logprobs = moved()
    loss, metrics = clip_cov_loss(logprobs, OLD, ADVANTAGES, MASK, selected=SELECTED, clip_low=0.2, clip_high=0.3)
    assert_close(loss, torch.tensor([[0.0, 0.0, -1.3, 2.2]]))
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.tensor([[0.0, 0.0, 0.0, 2.2]]))
    assert metrics["selected_fraction"].tolist() == [[1, 1, 0, 0]]
    assert metrics["clip_fraction"].tolist() == [[0, 0, 1, 0]]


def test_kl_cov_by_hand():
    """-A w is -2, -0.5, -2, 2.2; the first two have 0.5 log 2 added, which pulls each back to the old policy."""
    logprobs = moved()
    loss, metrics = kl_cov_loss(logprobs, OLD, ADVANTAGES, MASK, selected=SELECTED, cov_kl_coef=0.5)
    half = math.log(2) / 2
    assert_close(loss, torch.tensor([[-2 + half, -0.5 + half, -2.0, 2.2]]))
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.tensor([[-1.5, -1.0, -2.0, 2.2]]))
    assert_close(metrics["kl_penalty"], torch.tensor([[math.log(2), math.log(2), 0.0, 0.0]]))


@pytest.mark.parametrize("kl_kind", ["abs", "k2", "k3"])
def test_kl_cov_agrees_with_the_formula_in_numpy(kl_kind):
    table = columns(3)
    x, old, a, mask, chosen = (
        table[name].numpy() for name in ("logprobs", "old_logprobs", "advantages", "mask", "selected")
    )
    loss, _ = kl_cov_loss(
        *(table[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")),
        selected=table["selected"],
        cov_kl_coef=0.7,
        cov_kl_kind=kl_kind,
    )
    d = x - old
    penalty = {"abs": np.abs(d), "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[kl_kind]
    assert_close(loss.numpy(), np.where(mask, -a * np.exp(d) + 0.7 * chosen * penalty, 0.0))


def test_clip_cov_agrees_with_the_formula_in_numpy():
    table = columns(4)
    x, old, a, mask, chosen = (
        table[name].numpy() for name in ("logprobs", "old_logprobs", "advantages", "mask", "selected")
    )
    four = (table[name] for name in ("logprobs", "old_logprobs", "advantages", "mask"))
    loss, _ = clip_cov_loss(*four, selected=table["selected"], clip_low=1.0, clip_high=1e6)
    assert_close(loss.numpy(), np.where(mask & ~chosen, -a * np.exp(x - old), 0.0))


@pytest.mark.parametrize("wrong", [{"fraction": 1.5}, {"fraction": -0.1}])
def test_a_fraction_outside_its_range_is_rejected(wrong: dict[str, float]):
    with pytest.raises(ValueError, match="fraction"):
        select_kl_cov(COVARIANCES, RANKED, **wrong)
    with pytest.raises(ValueError, match="fraction"):
        select_clip_cov(COVARIANCES, RANKED, low=1, high=5, seed=0, **wrong)


def test_a_range_that_is_empty_is_rejected():
    with pytest.raises(ValueError, match=r"low .*5.* high .*1"):
        select_clip_cov(COVARIANCES, RANKED, fraction=0.1, low=5, high=1, seed=0)


def test_a_selection_that_is_not_bool_is_rejected():
    options = {"selected": SELECTED.float(), "clip_low": 0.2, "clip_high": 0.2}
    with pytest.raises(ValueError, match=r"selected .*torch.float32"):
        clip_cov_loss(OLD, OLD, ADVANTAGES, MASK, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"cov_kl_coef": -1.0}, r"cov_kl_coef .*-1.0"), ({"cov_kl_kind": "k1"}, r"cov_kl_kind .*'k1'")],
)
def test_options_of_kl_cov_outside_their_range_are_rejected(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        kl_cov_loss(OLD, OLD, ADVANTAGES, MASK, **({"selected": SELECTED, "cov_kl_coef": 1.0} | wrong))
