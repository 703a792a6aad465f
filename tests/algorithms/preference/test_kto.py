"""KTO against literals, its formula in NumPy, and finite differences."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import kto_loss, kto_reference_kl
from tests.engines.closeness import assert_norm_close

SETTINGS: dict[str, Any] = {"reference_kl": 0.4, "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}


def random_rows(seed: int, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs, ref_logprobs, desirable."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs = -9 * torch.rand((2, rows), generator=generator, dtype=torch.float64)
    return logprobs, ref_logprobs, torch.rand(rows, generator=generator) < 0.5


def test_by_hand():
    # beta (r - z) is ln 3 in both rows: 1 - 3/4 for the desirable one, 1 - 1/4 for the other.
    logprobs, ref_logprobs = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0 - np.log(9), -2.0 - np.log(9)]).float()
    desirable = torch.tensor([True, False])
    loss, metrics = kto_loss(logprobs, ref_logprobs, desirable, reference_kl=1.0, beta=0.5, undesirable_weight=2.0)
    assert_close(loss, torch.tensor([0.25, 1.5]))
    reward = 0.5 * (1 + float(np.log(9)))
    assert_close(metrics["chosen_reward"], torch.tensor([reward, 0.0]))
    assert_close(metrics["rejected_reward"], torch.tensor([0.0, reward]))
    assert metrics["accuracy"].tolist() == [1, 0] and metrics["is_chosen"].tolist() == [1, 0]


def test_the_reference_kl_by_hand_is_a_nonnegative_mean_without_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    value = kto_reference_kl(logprobs, torch.tensor([-2.0, -4.0, -3.0]))
    assert value.item() == 1.0 and not value.requires_grad
    assert kto_reference_kl(logprobs, torch.zeros(3)).item() == 0.0
    assert kto_reference_kl(logprobs[:0], torch.zeros(0)).item() == 0.0


def test_the_loss_agrees_with_the_formula_in_numpy():
    logprobs, ref_logprobs, desirable = random_rows(0)
    loss, _ = kto_loss(logprobs, ref_logprobs, desirable, **SETTINGS)
    ratio, is_good = (logprobs - ref_logprobs).numpy(), desirable.numpy()
    value_good = 1.2 / (1 + np.exp(-0.3 * (ratio - 0.4)))
    value_bad = 0.8 / (1 + np.exp(-0.3 * (0.4 - ratio)))
    expected = np.where(is_good, 1.2 - value_good, 0.8 - value_bad)
    assert_norm_close(loss, torch.from_numpy(expected))


def test_the_loss_passes_a_gradient_check():
    logprobs, ref_logprobs, desirable = random_rows(1)
    trained = logprobs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kto_loss(x, ref_logprobs, desirable, **SETTINGS)[0], (trained,))


def test_no_gradient_flows_into_the_reference_or_its_kl():
    logprobs, ref_logprobs, desirable = random_rows(2)
    point = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss, metrics = kto_loss(
        logprobs.requires_grad_(), ref_logprobs.requires_grad_(), desirable, reference_kl=point, beta=0.1
    )
    loss.sum().backward()
    assert logprobs.grad is not None and ref_logprobs.grad is None and point.grad is None
    assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize("ratio", [1e4, -1e4])
def test_extreme_ratios_stay_finite_in_value_and_gradient(ratio: float):
    logprobs, desirable = torch.full((2,), ratio, requires_grad=True), torch.tensor([True, False])
    loss, _ = kto_loss(logprobs, torch.zeros(2), desirable, reference_kl=0.0, beta=1.0)
    assert sorted(loss.tolist()) == [0.0, 1.0]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [0.0, 0.0]


def test_permuting_or_slicing_rows_permutes_or_slices_the_loss():
    rows, order = random_rows(3), torch.tensor([5, 1, 2])
    (loss, metrics), (part, part_metrics) = (
        kto_loss(*x, **SETTINGS) for x in (rows, [values[order] for values in rows])
    )
    assert_norm_close(part, loss[order])
    assert_norm_close(part_metrics, {name: value[order] for name, value in metrics.items()})


def test_bfloat16_is_float32_inside_and_an_empty_batch_is_empty():
    logprobs, ref_logprobs, desirable = random_rows(4)
    low = kto_loss(logprobs.bfloat16(), ref_logprobs.bfloat16(), desirable, **SETTINGS)
    same = kto_loss(logprobs.bfloat16().float(), ref_logprobs.bfloat16().float(), desirable, **SETTINGS)
    assert_close(low, same, rtol=0, atol=0)
    assert kto_loss(logprobs[:0], ref_logprobs[:0], desirable[:0], **SETTINGS)[0].shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, r"beta .*0\.0"),
        ({"reference_kl": -0.1}, r"reference_kl .*-0\.1"),
        ({"reference_kl": torch.zeros(8)}, r"reference_kl .*\[8\]"),
        ({"desirable_weight": -1.0}, r"desirable_weight .*-1\.0"),
        ({"desirable": torch.ones(8)}, r"desirable .*torch\.float32"),
        ({"logprobs": torch.zeros(7)}, r"\[7\].* \[8\].* \[8\]"),
    ],
)
def test_misuse_is_rejected(change: dict[str, Any], message: str):
    rows: dict[str, Any] = dict(zip(("logprobs", "ref_logprobs", "desirable"), random_rows(5), strict=True))
    with pytest.raises(ValueError, match=message):
        kto_loss(**rows | SETTINGS | change)
    with pytest.raises(ValueError, match=r"\[2\].* \[3\].*\[B\]"):
        kto_reference_kl(torch.zeros(2), torch.zeros(3))
