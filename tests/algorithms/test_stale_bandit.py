"""Tests the effect of importance weights on the gradient of a bandit with stale samples, in closed form.

A policy pi over four arms with rewards r was sampled as mu. The expectation of any function of the sampled arm is its
mean under mu, computed exactly over all arms. Shape suffix: A arms.
"""

from collections.abc import Callable

import pytest
import torch

from flowrl.algorithms.corrections import masked_weights, truncated_weights
from flowrl.algorithms.losses.policy_losses import clipped_policy_loss, decoupled_policy_loss
from tests.engines.closeness import assert_norm_close

REWARDS_A = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
LOGITS_A = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64)
PI_A = LOGITS_A.softmax(-1)
STALE_A = (LOGITS_A + torch.tensor([-1.2, 0.8, 0.1, -0.1], dtype=torch.float64)).softmax(-1)
OLDER_A = (LOGITS_A + torch.tensor([0.5, -0.7, 0.9, 0.2], dtype=torch.float64)).softmax(-1)
SCORES_AA = torch.eye(4, dtype=torch.float64) - PI_A
"""d log pi(a) / d logits, one row per arm."""
TRUE_A = (PI_A * REWARDS_A) @ SCORES_AA
"""d E_pi[r] / d logits."""
NO_BOUND = float("inf")


def weights(behavior_A: torch.Tensor, max_weight: float, rule: Callable = truncated_weights) -> torch.Tensor:
    """Returns the weight of each arm, from a batch of one token per arm."""
    mask = torch.ones(4, 1, dtype=torch.bool)
    actual, _ = rule(PI_A.log()[:, None], behavior_A.log()[:, None], mask, level="token", max_weight=max_weight)
    return actual[:, 0]


def gradient(sampled_A: torch.Tensor, weights_A: torch.Tensor, baseline: float = 0.0) -> torch.Tensor:
    """Returns the expected gradient E[w(a) (r(a) - baseline) d log pi(a)] under the sampling policy."""
    return (sampled_A * weights_A * (REWARDS_A - baseline)) @ SCORES_AA


def test_the_expectation_is_the_true_gradient_on_fresh_samples():
    assert_norm_close(gradient(PI_A, weights(PI_A, 2.0)), TRUE_A)


@pytest.mark.parametrize("baseline", [0.0, 0.4, -3.0])
def test_untruncated_weights_remove_the_bias_of_stale_samples(baseline: float):
    actual = gradient(STALE_A, weights(STALE_A, NO_BOUND), baseline)
    assert_norm_close(actual, TRUE_A)


def test_without_weights_stale_samples_are_biased_and_a_baseline_changes_the_gradient():
    plain = gradient(STALE_A, torch.ones(4, dtype=torch.float64))
    shifted = gradient(STALE_A, torch.ones(4, dtype=torch.float64), baseline=-3.0)
    assert (plain - TRUE_A).norm() > 0.5 * TRUE_A.norm()
    assert shifted @ TRUE_A < 0  # an ascent that descends


def test_a_bound_above_all_weights_causes_no_bias():
    largest = float((PI_A / STALE_A).max())
    assert_norm_close(gradient(STALE_A, weights(STALE_A, largest)), TRUE_A)


@pytest.mark.parametrize("bound", [2.0, 1.5, 1.0])
def test_truncation_bias_equals_the_truncated_probability(bound: float):
    cut_A = (PI_A - bound * STALE_A).clamp(min=0)
    bias = gradient(STALE_A, weights(STALE_A, bound)) - TRUE_A
    assert cut_A.sum() > 0
    assert_norm_close(bias, -(cut_A * REWARDS_A) @ SCORES_AA)


def test_the_bias_shrinks_as_the_bound_grows_and_is_below_that_of_no_weights():
    unweighted = (gradient(STALE_A, torch.ones(4, dtype=torch.float64)) - TRUE_A).norm()
    biases = [(gradient(STALE_A, weights(STALE_A, bound)) - TRUE_A).norm() for bound in (1.0, 1.5, 2.0, 4.0)]
    assert unweighted > biases[0] > biases[1] > biases[2] > biases[3] < 1e-14


def test_masking_removes_tokens_that_truncation_bounds():
    beyond_A = PI_A > 2.0 * STALE_A
    bias = gradient(STALE_A, weights(STALE_A, 2.0, masked_weights)) - TRUE_A
    assert_norm_close(bias, -(PI_A * beyond_A * REWARDS_A) @ SCORES_AA)


def test_samples_of_several_versions_are_unbiased_with_their_own_probabilities():
    share = 0.3
    own = share * gradient(STALE_A, weights(STALE_A, NO_BOUND)) + (1 - share) * gradient(
        OLDER_A, weights(OLDER_A, NO_BOUND)
    )
    newest_for_all = share * gradient(STALE_A, weights(STALE_A, NO_BOUND)) + (1 - share) * gradient(
        OLDER_A, weights(STALE_A, NO_BOUND)
    )
    assert_norm_close(own, TRUE_A)
    assert (newest_for_all - TRUE_A).norm() > 0.1 * TRUE_A.norm()


@pytest.mark.parametrize("loss", ["clipped and weighed", "decoupled"])
def test_the_losses_follow_the_true_gradient_from_stale_samples(loss: str):
    logits_A = LOGITS_A.clone().requires_grad_()
    logprobs_A1, mask = logits_A.log_softmax(-1)[:, None], torch.ones(4, 1, dtype=torch.bool)
    before, advantages = PI_A.log()[:, None], REWARDS_A[:, None]
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    if loss == "decoupled":
        behavior = STALE_A.log()[:, None]
        loss_A1, _ = decoupled_policy_loss(logprobs_A1, before, advantages, mask, behavior_logprobs=behavior, **clips)
    else:
        loss_A1, _ = clipped_policy_loss(logprobs_A1, before, advantages, mask, **clips)
        loss_A1 = loss_A1 * weights(STALE_A, NO_BOUND)[:, None]
    (STALE_A[:, None] * loss_A1).sum().backward()
    assert logits_A.grad is not None
    assert_norm_close(-logits_A.grad, TRUE_A)
