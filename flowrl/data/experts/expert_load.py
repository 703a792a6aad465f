"""Metrics of the load of the experts of a mixture. Merged metrics describe all tokens of a step.

Shape suffixes: E experts, L layers.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

Statistic = Literal["router_loss", "expert_load_max", "dead_experts"]
"""`router_loss`: load-balancing loss, as a mean over the layers. `expert_load_max`: load of the expert with most
tokens, as a multiple of the mean load, in the layer where this multiple is largest. `dead_experts`: share of the
experts of all layers that receive no token."""


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """A statistic of the routes of some tokens. `merge` adds the routes of other tokens."""

    statistic: Statistic
    counts: np.ndarray
    """[L, E], number of tokens of each expert."""
    probability_sums: np.ndarray
    """[L, E], sum of the probabilities of each expert over the tokens."""

    def merge(self, other: Self) -> "ExpertLoad":
        return ExpertLoad(self.statistic, self.counts + other.counts, self.probability_sums + other.probability_sums)

    def result(self) -> float:
        if self.statistic == "dead_experts":
            return float((self.counts == 0).mean())
        if self.statistic == "expert_load_max":
            return float((self.counts / self.counts.mean(1, keepdims=True)).max())
        # The probabilities of a token sum up to 1.
        num_tokens_L1 = self.probability_sums.sum(1, keepdims=True)
        products_LE = self.counts / num_tokens_L1 * self.probability_sums / num_tokens_L1
        return float(self.counts.shape[1] * products_LE.sum(1).mean())
