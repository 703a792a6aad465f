"""The pieces that policy losses share, by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.losses.surrogates import bounded_ratio, check_clips, clipped_surrogate, weighted_score


def test_importance_ratio_by_hand_and_held_at_twenty():
    ratio = bounded_ratio(torch.tensor([0.0, math.log(3), 1e4, -1e4], dtype=torch.float64))
    assert_close(ratio, torch.tensor([1.0, 3.0, math.exp(20), math.exp(-20)], dtype=torch.float64))


def test_weighted_score_has_the_weight_in_value_and_in_gradient():
    weights, logprobs = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor([-3.0, -1e4], requires_grad=True)
    score = weighted_score(weights, logprobs)
    score.sum().backward()
    assert score.tolist() == [2.0, 0.5]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [2.0, 0.5]
    assert weights.grad is None


def test_clipped_surrogate_by_hand():
    ratio, advantages = torch.tensor([[2.0, 0.5, 2.0, 0.5]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, metrics = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.3)
    assert_close(loss, torch.tensor([[-1.3, -0.5, 2.0, 0.8]]))
    assert metrics["clip_fraction_high"].tolist() == [[1, 0, 0, 0]]
    assert metrics["clip_fraction_low"].tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("clips", [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
def test_clips_outside_their_range_are_refused(clips: tuple[float, float]):
    with pytest.raises(ValueError, match=r"clip_(low|high) is"):
        check_clips(*clips)
