"""Scores of one response by all rewards of a run, and their weighted sum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FAILED, CALLS = "reward_failed", "reward_calls"
"""Names of the row columns of a reward: whether a call failed, and the records of all calls as plain dictionaries."""


@dataclass(frozen=True)
class RewardCall:
    """Record of the call of one reward for one response."""

    score: float | None
    """Score, before its weight; None if the call failed."""
    seconds: float | None = None
    """Duration of the call in seconds, without waiting in a queue and without failed attempts before it. None for a
    model.
    """
    failure: str | None = None
    """Kind of failure, such as `timeout`, or None."""
    message: str = ""
    """Cause of the failure."""

    def to_dict(self) -> dict[str, str | float | None]:
        """Returns the fields by name, as in the column `CALLS`."""
        return dict(vars(self))  # dataclasses.asdict takes 20 times as long


@dataclass(frozen=True)
class RowScores:
    """Result of all rewards for one response."""

    values: Mapping[str, float]
    """Column -> score. NaN if the reward does not apply to the data source of the row."""
    calls: Mapping[str, RewardCall]
    """Name of a reward -> record of its call. Rewards that do not apply have none."""

    @property
    def is_failed(self) -> bool:
        """Whether a call has failed."""
        return any(call.failure is not None for call in self.calls.values())


def weighted_sum(scores: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the sum of weight times score over the rewards that apply: those whose score is not NaN."""
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True) if not math.isnan(score))
