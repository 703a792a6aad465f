"""Tests that functions reject settings that are NaN or out of range."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flowrl import algorithms as a

NAN = math.nan
ONE, MASK = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
PAIR = torch.zeros(1)
LOGITS, TOKENS = torch.zeros(1, 2, 3), torch.zeros(1, 2).long()
POLICY = (ONE, ONE, ONE, MASK)
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ppo": (partial(a.clipped_policy_loss, *POLICY), CLIPS | {"dual_clip": 3.0}),
    "decoupled_ppo": (partial(a.decoupled_policy_loss, *POLICY, behavior_logprobs=ONE, **CLIPS), {"max_weight": 5.0}),
    "sapo": (partial(a.sapo_loss, *POLICY), {"temperature_positive": 1.0, "temperature_negative": 1.0}),
    "gspo": (partial(a.gspo_loss, *POLICY), CLIPS),
    "gspo_token": (partial(a.gspo_token_loss, *POLICY), CLIPS),
    "gmpo": (partial(a.gmpo_loss, *POLICY), CLIPS),
    "cispo": (partial(a.cispo_loss, *POLICY), CLIPS),
    "dppo": (
        partial(a.dppo_loss, *POLICY, divergence="tv"),
        {"delta_low": 0.1, "delta_high": 0.1, "max_ratio": 2.0},
    ),
    "clip_cov": (partial(a.clip_cov_loss, *POLICY, selected=MASK), CLIPS),
    "select_clip_cov": (partial(a.select_clip_cov, ONE, MASK, seed=0), {"fraction": 0.5, "low": 0.0, "high": 1.0}),
    "select_kl_cov": (partial(a.select_kl_cov, ONE, MASK), {"fraction": 0.5}),
    "kl_cov": (partial(a.kl_cov_loss, *POLICY, selected=MASK), {"cov_kl_coef": 1.0}),
    "gae": (partial(a.gae, ONE, ONE, MASK), {"gamma": 1.0, "lam": 1.0}),
    "aggregate": (
        partial(a.aggregate, ONE, MASK, mode="seq_mean_token_sum_norm"),
        {"denominator": 1.0, "scale": 1.0},
    ),
    "truncated": (partial(a.truncated_weights, ONE, ONE, MASK, level="token"), {"max_weight": 2.0, "min_weight": 0.0}),
    "masked": (partial(a.masked_weights, ONE, ONE, MASK, level="token"), {"max_weight": 2.0, "min_weight": 0.0}),
    "rejection": (
        partial(a.rejection_mask, ONE, ONE, MASK, kl_kind="k1", rejection_level="token"),
        {"high": 1.0, "low": -1.0},
    ),
    "normalized_weights": (partial(a.normalized_weights, ONE, MASK), {"mean": 1.0}),
    "kl_shaped_rewards": (partial(a.kl_shaped_rewards, PAIR, ONE, ONE, MASK, kind="k1"), {"coef": 0.1}),
    "token_logprobs": (partial(a.token_logprobs, LOGITS, TOKENS), {"temperature": 1.0}),
    "token_entropy": (partial(a.token_entropy, LOGITS), {"temperature": 1.0}),
    "logprobs_from_hidden": (
        partial(a.logprobs_from_hidden, torch.zeros(1, 2, 3), torch.zeros(4, 3), TOKENS, MASK),
        {"temperature": 1.0, "softcap": 30.0},
    ),
    "value_loss": (partial(a.clipped_value_loss, ONE, ONE, ONE, MASK), {"clip": 0.2}),
    "dpo": (partial(a.dpo_loss, PAIR, PAIR, PAIR, PAIR), {"beta": 0.1, "label_smoothing": 0.1}),
    "simpo": (partial(a.simpo_loss, PAIR, PAIR), {"beta": 2.0, "margin": 0.5}),
    "orpo": (partial(a.orpo_loss, PAIR - 1, PAIR - 1), {"coef": 0.1}),
    "pairwise": (partial(a.pairwise_reward_loss, PAIR, PAIR), {"margin": 0.1}),
    "kto": (
        partial(a.kto_loss, PAIR, PAIR, PAIR.bool()),
        {"reference_kl": 0.0, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
    "ptx": (partial(a.ptx_weights, form="add"), {"coef": 0.1}),
    "clip_rewards": (partial(a.clip_rewards, PAIR), {"low": -1.0, "high": 1.0}),
    "fixed control": (a.FixedKlControl, {"coef": 0.1}),
    "adaptive control": (a.AdaptiveKlControl, {"coef": 0.1, "target": 1.0, "horizon": 10.0}),
}


@pytest.mark.parametrize(("name", "setting"), [(name, s) for name, (_, settings) in CALLS.items() for s in settings])
def test_nan_settings_are_rejected(name: str, setting: str) -> None:
    function, settings = CALLS[name]
    function(**settings)
    with pytest.raises(ValueError, match=rf"{setting} .*nan"):
        function(**settings | {setting: NAN})


@pytest.mark.parametrize("estimator", [partial(a.grpo, normalize_std=True), partial(a.gpg, normalize_std=True)])
def test_eps_may_be_zero_but_not_negative(estimator):
    scores, groups, mask = torch.tensor([0.7, 0.7, 1.0, 3.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 1).bool()
    assert estimator(scores, groups, mask, eps=0.0)[:2].tolist() == [[0.0], [0.0]]
    with pytest.raises(ValueError, match=r"eps .*-1"):
        estimator(scores, groups, mask, eps=-1)
