"""Importance ratios without bounds, and the denominator of an aggregation, for tests."""

import math

import torch

from flowrl.algorithms import AggregationMode, RatioLevel, truncated_weights


def importance_ratios(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, *, level: RatioLevel
) -> torch.Tensor:
    """Returns the ratios [B, T] before their truncation."""
    return truncated_weights(logprobs, rollout_logprobs, mask, level=level, max_weight=math.inf)[1]["ratio"]


def aggregation_count(mask: torch.Tensor, *, mode: AggregationMode) -> torch.Tensor:
    """Returns the number of tokens, or of rows with a token."""
    return mask.sum() if mode == "token_mean" else mask.any(-1).sum()
