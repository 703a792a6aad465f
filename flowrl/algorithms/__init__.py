"""The maths: pure functions on padded tensors with explicit masks. No config, no logging, no moves between devices."""

from flowrl.algorithms.advantages import gae, grpo, whiten
from flowrl.algorithms.aggregation import AggregationMode, aggregate, aggregation_count
from flowrl.algorithms.kl import KlKind, kl_estimate, kl_shaped_rewards
from flowrl.algorithms.logprobs import token_entropy, token_logprobs
from flowrl.algorithms.masks import last_masked, masked_mean
from flowrl.algorithms.policy_losses import clipped_policy_loss
from flowrl.algorithms.values import clipped_value_loss, explained_variance

__all__ = [
    "AggregationMode",
    "KlKind",
    "aggregate",
    "aggregation_count",
    "clipped_policy_loss",
    "clipped_value_loss",
    "explained_variance",
    "gae",
    "grpo",
    "kl_estimate",
    "kl_shaped_rewards",
    "last_masked",
    "masked_mean",
    "token_entropy",
    "token_logprobs",
    "whiten",
]
