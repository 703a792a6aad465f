"""Reward shaping: length penalties, clipping and running normalization, applied before advantage estimation.

Shape suffix: B rows. Results have at least float32 and carry no gradient. All functions raise ValueError for settings
out of range or mismatched shapes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_extremes, group_index
from flowrl.algorithms.masking import at_least_float32
from flowrl.algorithms.registry import Constant, NonNegativeFloat, PositiveInt, reward_shaping


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Returns DAPO's soft penalty for responses close to the length limit. Add it to the score.

        P = 0                                    where l <= max_length - buffer
        P = (max_length - buffer - l) / buffer   where max_length - buffer < l <= max_length
        P = -1                                   where l > max_length

    Args:
        lengths: [B], response lengths l in tokens, counted in the same way as the length limit.
        max_length: > 0, in tokens. The penalty is -1 from this length on. Set it to the length limit, so that a
            response that reaches the limit has the full penalty. An episode whose next observation does not fit ends
            below the limit.
        buffer: in [1, max_length], number of tokens over which the penalty grows (paper: 4,096 of 20,480).
    Returns: [B] in [-1, 0], float32.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. (13).
    """
    _check_rows("lengths", lengths)
    if max_length <= 0:
        raise ValueError(f"max_length is {max_length}, but must be above 0, in tokens")
    if buffer < 1:
        raise ValueError(f"buffer is {buffer}, but must be at least 1")
    _check_buffer(max_length, buffer)
    # Lengths above 2^24 are not exact in float32.
    penalty_B = (max_length - buffer - lengths.double()) / buffer
    return penalty_B.clamp(-1, 0).to(torch.float32)


@torch.no_grad()
def length_penalty(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """Returns the length reward of Kimi k1.5: within a group, short correct responses gain and long responses lose.

        x_i = 1/2 - (l_i - min(l)) / (max(l) - min(l))      min and max over the group of row i
        P_i = x_i if the response is correct, else min(0, x_i)

    Args:
        lengths: [B], response lengths l in tokens.
        correct: bool [B], whether the response is correct.
        groups: integer [B], group ids.
    Returns: [B] in [-1/2, 1/2], float32. Add it to the score with a weight. It is 0 for a group of equal lengths and
        for a group of one row.

    Kimi Team 2025, https://arxiv.org/abs/2501.12599, section on the length penalty.
    """
    _check_rows("lengths", lengths)
    for name, rows in (("correct", correct), ("groups", groups)):
        if rows.shape != lengths.shape:
            raise ValueError(f"{name} has shape {list(rows.shape)}, but lengths has {list(lengths.shape)}")
    if correct.dtype != torch.bool:
        raise ValueError(f"correct is {correct.dtype}, but must be torch.bool: compare the scores with a threshold")
    lengths_B = lengths.double()
    low_B, high_B = group_extremes(lengths_B, group_index(groups))
    reward_B = 0.5 - (lengths_B - low_B) / (high_B - low_B).clamp(min=1)
    reward_B = torch.where(correct, reward_B, reward_B.clamp(max=0))
    return torch.where(high_B > low_B, reward_B, 0).to(torch.float32)


def _check_buffer(max_length: int, buffer: int) -> None:
    if buffer > max_length:
        raise ValueError(f"buffer is {buffer}, above max_length: set it to at most {max_length}")


def _check_start(max_length: int, buffer: int, max_response_tokens: int) -> None:
    if (start := max_length - buffer) >= max_response_tokens:
        raise ValueError(
            f"algorithm.shaping overlong_penalty starts at max_length - buffer = {start} tokens, but "
            f"rollout.max_response_tokens is {max_response_tokens}, so it would have no effect: lower max_length"
        )


@reward_shaping.register("overlong_penalty", checks=(_check_buffer, _check_start))
@torch.no_grad()
def with_overlong_penalty(
    rewards: Tensor, lengths: Tensor, *, max_length: PositiveInt, buffer: PositiveInt, coef: NonNegativeFloat = 1.0
) -> Tensor:
    """Subtracts a penalty from responses close to the length limit (DAPO). The length includes the tokens of an
    environment, as in `rollout.max_response_tokens`.

    Adds coef times `overlong_penalty` to the rewards.

    Args:
        rewards: [B].
        lengths: [B], see `overlong_penalty`.
        max_length: Response length in tokens from which the full penalty applies, usually
            `rollout.max_response_tokens`.
        buffer: Number of tokens before max_length over which the penalty grows linearly from 0.
        coef: Full penalty, in units of the score.
    Returns: [B].
    """
    _check_same(rewards, lengths=lengths)
    return at_least_float32(rewards) + coef * overlong_penalty(lengths, max_length=max_length, buffer=buffer)


@reward_shaping.register("length_penalty")
@torch.no_grad()
def with_length_penalty(
    rewards: Tensor, lengths: Tensor, scores: Tensor, groups: Tensor, *, correct_from: float, coef: NonNegativeFloat
) -> Tensor:
    """Adds a length reward within each group: short correct responses gain and long responses lose (Kimi k1.5). The
    length includes the tokens of an environment.

    Adds coef times `length_penalty` to the rewards.

    Args:
        rewards: [B].
        lengths, groups: see `length_penalty`.
        scores: [B], task scores before any shaping.
        correct_from: Smallest score of a correct response.
        coef: Weight of the length reward, in units of the score.
    Returns: [B]. A NaN score is not correct. The paper increases coef from 0 during training.
    """
    _check_same(rewards, lengths=lengths, scores=scores)
    return at_least_float32(rewards) + coef * length_penalty(lengths, scores >= correct_from, groups)


def _check_bounds(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        raise ValueError("clip_rewards has neither low nor high and would have no effect: set at least one")
    lowest, highest = float("-inf") if low is None else low, float("inf") if high is None else high
    if not lowest < highest:
        raise ValueError(f"low is {lowest:g} and high is {highest:g}: low must be below high")


@reward_shaping.register("clip_rewards", checks=(_check_bounds,))
@torch.no_grad()
def clip_rewards(rewards: Tensor, *, low: float | None = None, high: float | None = None) -> Tensor:
    """Clips scores to [low, high]. NaN stays NaN.

    Args:
        rewards: any shape.
        low: Lower bound of the scores; null disables it.
        high: Upper bound of the scores; null disables it.

    Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, describe reward clipping in published PPO code.
    """
    _check_bounds(low, high)
    return at_least_float32(rewards).clamp(low, high)


@dataclass(frozen=True)
class RewardMoments:
    """Running count, mean and sum of squared deviations of all rewards so far; saved in checkpoints."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0

    @property
    def std(self) -> float:
        """Returns the unbiased standard deviation. It is 0 for fewer than two rewards."""
        return math.sqrt(self.sum_of_squares / max(self.count - 1, 1))


@torch.no_grad()
def update_moments(moments: RewardMoments, rewards: Tensor) -> RewardMoments:
    """Returns the moments updated with a batch of unnormalized rewards [B] (parallel Welford update).

    Synchronizes with the device. Raises ValueError if the rewards do not have shape [B] or are not finite.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    _check_rows("rewards", rewards)
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards has a value that is NaN or infinite: exclude such rows first")
    if len(rewards) == 0:
        return moments
    rewards_B = rewards.double()
    count, mean = moments.count + len(rewards_B), float(rewards_B.mean())
    shift = mean - moments.mean
    sum_of_squares = float((rewards_B - mean).square().sum())
    return RewardMoments(
        count=count,
        mean=moments.mean + shift * len(rewards_B) / count,
        sum_of_squares=moments.sum_of_squares + sum_of_squares + shift**2 * moments.count * len(rewards_B) / count,
    )


@reward_shaping.register("normalize_rewards")
@torch.no_grad()
def normalize_rewards(
    rewards: Tensor, moments: RewardMoments, *, shift_mean: bool = False, eps: Constant[float] = 1e-8
) -> Tensor:
    """Divides scores by their running standard deviation over all steps.

        y = r / std                 without shift_mean, which keeps the sign of the rewards
        y = (r - mean) / std        with shift_mean

    Args:
        rewards: any shape.
        moments: moments of all rewards so far. They may include the rewards of this call.
        shift_mean: Also subtract the running mean.
        eps: a standard deviation up to eps counts as 0.
    Returns: the same shape. Rewards are not scaled while the standard deviation is 0.

    Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, describe reward scaling in published PPO code. Deviations
    from it: the moments are of rewards instead of discounted returns, and eps is a threshold instead of a summand.
    """
    shifted = at_least_float32(rewards) - (moments.mean if shift_mean else 0)
    return shifted / moments.std if moments.std > eps else shifted


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dim() != 1:
        raise ValueError(f"{name} has shape {list(rows.shape)}, but must be [B]")


def _check_same(rewards: Tensor, **rows: Tensor) -> None:
    _check_rows("rewards", rewards)
    for name, values in rows.items():
        if values.shape != rewards.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, but rewards has {list(rewards.shape)}")
