"""Reward shaping: length penalties, clipping and running normalization, applied before advantage estimation.

Shape suffixes: B rows.

Nothing here carries a gradient. Results are in at least float32.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_extremes, group_index
from flowrl.algorithms.masks import at_least_float32


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Returns DAPO's soft penalty for responses close to the length limit, to be added to the score.

        P = 0                                    l <= max_length - buffer
        P = (max_length - buffer - l) / buffer   up to max_length
        P = -1                                   beyond

    Arguments:
        lengths: [B], the length of each response in tokens.
        max_length: > 0, where the punishment is full. It is reached, not passed, by a response cut off at this length.
        buffer: in 1 to max_length, over how many tokens it grows (the paper: 4,096 of 20,480).
    Returns: [B] in [-1, 0], float32; multiply it by what a full punishment is worth in units of the score.
    Raises: ValueError on lengths that are not [B], or a max_length or buffer outside its range.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. (13). Deviation: none.
    """
    _check_rows("lengths", lengths)
    if max_length <= 0:
        raise ValueError(f"max_length is {max_length}, it must be above 0, in tokens")
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}, it must be in 1 to max_length, which is {max_length}")
    # Not straight to float32: there a length above 2^24 is no whole number any more.
    penalty_B = (max_length - buffer - lengths.double()) / buffer
    return penalty_B.clamp(-1, 0).to(torch.float32)


@torch.no_grad()
def length_penalty(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """Returns the length reward of Kimi k1.5: within a group, short correct responses gain and long ones lose.

        x_i = 1/2 - (l_i - min(l)) / (max(l) - min(l))      over the rows of the group of row i
        P_i = x_i if the answer is correct, else min(0, x_i)

    Arguments:
        lengths: [B], the length of each response in tokens.
        correct: bool [B].
        groups: integer [B], rows with equal ids form a group.
    Returns: [B] in [-1/2, 1/2], float32, to be added to the score with a weight (from 0 at the start of training, as
        the report does: it slows the first part down). A group of equal lengths gives 0, and so does a group of one.
    Raises: ValueError on shapes that differ, on a `correct` that is not bool, on ids that are not integers.

    Kimi Team 2025, https://arxiv.org/abs/2501.12599, the section on the length penalty. Deviation: none.
    """
    _check_rows("lengths", lengths)
    for name, rows in (("correct", correct), ("groups", groups)):
        if rows.shape != lengths.shape:
            raise ValueError(f"{name} has shape {list(rows.shape)}, it must be that of lengths, {list(lengths.shape)}")
    if correct.dtype != torch.bool:
        raise ValueError(f"correct is {correct.dtype}, it must be torch.bool: say from which score on it is")
    lengths_B = lengths.double()
    low_B, high_B = group_extremes(lengths_B, group_index(groups))
    reward_B = 0.5 - (lengths_B - low_B) / (high_B - low_B).clamp(min=1)
    reward_B = torch.where(correct, reward_B, reward_B.clamp(max=0))
    return torch.where(high_B > low_B, reward_B, 0).to(torch.float32)


@torch.no_grad()
def with_overlong_penalty(
    rewards: Tensor, lengths: Tensor, *, max_length: int, buffer: int, coef: float = 1.0
) -> Tensor:
    """Adds coef times `overlong_penalty` (DAPO) to the rewards.

    Arguments:
        rewards: [B].
        lengths, max_length, buffer: as of `overlong_penalty`.
        coef: what a full punishment costs, in units of the reward; 1 in the paper.
    Returns: [B] in at least float32.
    Raises: ValueError on shapes that differ, and as `overlong_penalty`.
    """
    _check_same(rewards, lengths=lengths)
    return at_least_float32(rewards) + coef * overlong_penalty(lengths, max_length=max_length, buffer=buffer)


@torch.no_grad()
def with_length_penalty(
    rewards: Tensor, lengths: Tensor, scores: Tensor, groups: Tensor, *, correct_from: float, coef: float
) -> Tensor:
    """Adds coef times `length_penalty` (Kimi k1.5) to the rewards.

    Arguments:
        rewards: [B].
        lengths, groups: as of `length_penalty`.
        scores: [B], of the task itself, from which it is told whether an answer is correct; what other shaping made of
            them does not matter.
        correct_from: an answer is correct from this score on. NaN is not.
        coef: what P counts, in units of the reward; the report raises it from 0.
    Returns: [B] in at least float32.
    Raises: ValueError on shapes that differ, on ids that are not integers.
    """
    _check_same(rewards, lengths=lengths, scores=scores)
    return at_least_float32(rewards) + coef * length_penalty(lengths, scores >= correct_from, groups)


@torch.no_grad()
def clip_rewards(rewards: Tensor, *, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Clips rewards to [low, high].

    Arguments:
        rewards: any shape.
        low, high: in units of the reward; low below high. One that is not given is no bound.
    Returns: the same shape. NaN stays NaN: it is a defect of the reward, and no clip mends it.
    Raises: ValueError on a low that is not below high.

    The reward clipping of the published PPO code, one of the code-level optimizations of Engstrom et al. 2020,
    https://arxiv.org/abs/2005.12729.
    """
    if not low < high:
        raise ValueError(f"low is {low} and high is {high}: low must be below high")
    return at_least_float32(rewards).clamp(low, high)


@dataclass(frozen=True)
class RewardMoments:
    """Running count, mean and sum of squared deviations of all rewards so far; saved in checkpoints."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 for fewer than two rewards."""
        return math.sqrt(self.sum_of_squares / max(self.count - 1, 1))


@torch.no_grad()
def update_moments(moments: RewardMoments, rewards: Tensor) -> RewardMoments:
    """Returns the moments updated with a batch of rewards (parallel Welford update).

    Arguments:
        moments: RewardMoments() at the start.
        rewards: [B], the whole batch, before any normalisation. An empty one changes nothing.
    Returns: new moments; it waits for the device.
    Raises: ValueError on rewards that are not [B], or not finite: they would stay in the moments for ever.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    _check_rows("rewards", rewards)
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards has a value that is NaN or infinite: leave such rows out before the moments see them")
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


@torch.no_grad()
def normalize_rewards(rewards: Tensor, moments: RewardMoments, *, shift_mean: bool, eps: float = 1e-8) -> Tensor:
    """Divides rewards by the running standard deviation of all rewards so far.

        y = r / std      or with shift_mean      y = (r - mean) / std

    Arguments:
        rewards: any shape.
        moments: of the rewards so far, these included or not.
        shift_mean: false keeps the sign, and where the zero of the reward lies.
        eps: a standard deviation up to here counts as none.
    Returns: the same shape. Where there is no standard deviation, before the second reward or while all are equal, the
        scale is unknown and stays as it is.

    The scaling by a running standard deviation of PPO code, one of the code-level optimizations of Engstrom et al.
    2020, https://arxiv.org/abs/2005.12729. Deviations: the moments are of rewards, as in code for language models, and
    not of discounted returns; eps is a threshold and not a summand.
    """
    shifted = at_least_float32(rewards) - (moments.mean if shift_mean else 0)
    return shifted / moments.std if moments.std > eps else shifted


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dim() != 1:
        raise ValueError(f"{name} has shape {list(rows.shape)}, it must be [B]: one per row")


def _check_same(rewards: Tensor, **rows: Tensor) -> None:
    _check_rows("rewards", rewards)
    for name, values in rows.items():
        if values.shape != rewards.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, it must be that of rewards, {list(rewards.shape)}"
            )
