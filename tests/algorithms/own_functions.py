"""User functions that configs select as tests.algorithms.own_functions:name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.algorithms.registry import policy_losses


@policy_losses.register("half_reinforce")
def half(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, weight: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    return (-weight * advantages * logprobs).masked_fill(~mask, 0), {}


def sign(scores: Tensor, mask: Tensor, *, bar: float) -> Tensor:
    return torch.where(mask, (scores - bar).sign()[:, None], 0)


def with_critic(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (rewards - values).masked_fill(~mask, 0), rewards


def rows_only(scores: Tensor, mask: Tensor) -> Tensor:
    return scores


def kept_half(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.full_like(logprobs, 0.5), {}


def squared(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).square()


def tenth(loss: Tensor, mask: Tensor, *, denominator: float) -> Tensor:
    return loss.masked_fill(~mask, 0).sum() / denominator / 10


def with_bonus(scores: Tensor, bonus: Tensor, mask: Tensor, malus: Tensor | None = None) -> Tensor:
    totals_B = scores + bonus if malus is None else scores + bonus - malus
    return torch.where(mask, totals_B[:, None], 0)


def large_advantages(advantages: Tensor, mask: Tensor, *, bar: float) -> Tensor:
    return mask & (advantages > bar)


@policy_losses.register("large_only", prepare={"is_large": large_advantages})
def large_only(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, is_large: Tensor, *, weight: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    return (-weight * advantages * logprobs).masked_fill(~is_large, 0), {}


def wrong_inputs(logits: Tensor, mask: Tensor) -> Tensor:
    return logits


def scaled(rewards: Tensor, *, by: float) -> Tensor:
    return rewards * by


def summed(rewards: Tensor) -> Tensor:
    return rewards.sum()


@dataclass(frozen=True)
class LastKl:
    """Controller whose coefficient is the KL of the previous step."""

    coef: float

    def update(self, kl: float, num_rows: int) -> "LastKl":
        return LastKl(kl)


@dataclass(frozen=True)
class NoControl:
    coef: float


def gap(chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, margin: float) -> tuple[Tensor, dict[str, Tensor]]:
    return rejected_logprobs - chosen_logprobs + margin, {}


NOT_A_FUNCTION = 3
