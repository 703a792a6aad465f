"""Selects the groups and rows of a step that are trained, by their scores.

Dynamic sampling is that of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2): a group whose scores
are all equal has no advantage, so it is dropped, and other prompts are generated in its place.

Shape suffixes: G groups, S samples per group, B rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.config import DynamicSampling
from flowrl.data.batch.batch import Batch
from flowrl.rewards.row_scorer import FAILED

ROUND_DROP_REASONS = ("equal_scores", "failed", "surplus")
"""Reasons why a scored group of a round is not trained:

- `equal_scores`: all of its scores are equal.
- `failed`: fewer than two of its rows have a score.
- `surplus`: other groups fill the batch.
"""


@dataclass(frozen=True)
class SelectedGroup:
    """Result for one group."""

    rows: tuple[int, ...]
    """Indices of the trained rows within the group. Empty if the group is dropped."""
    reason: str | None
    """Reason for dropping the group, or None."""
    success: float
    """Mean score of the rows whose reward did not fail; NaN if all failed."""

    @property
    def has_success(self) -> bool:
        return not math.isnan(self.success)


class GroupFilter:
    """Selects groups with different scores, and rows whose reward did not fail, as the settings require."""

    def __init__(
        self,
        dynamic_sampling: DynamicSampling | None,
        *,
        samples: int,
        drops_failed: bool = False,
        needs_success: bool = False,
    ) -> None:
        """
        Args:
            dynamic_sampling: settings; None keeps groups with equal scores.
            samples: rows per group.
            drops_failed: whether rows with `reward_failed` are dropped.
            needs_success: whether the order of the prompts depends on their scores.
        """
        sampling = dynamic_sampling
        self._column = "scores" if sampling is None else sampling.column
        self._samples, self._drops_equal = samples, sampling is not None
        self._drops_failed = drops_failed
        self._reads_failed = drops_failed or needs_success
        self.is_active = self._drops_equal or drops_failed or needs_success
        """Whether the driver needs the scores of a batch before it trains on it."""
        self.columns = tuple(dict.fromkeys(("scores", self._column, *((FAILED,) if self._reads_failed else ()))))
        """Columns that `select` reads."""
        self.max_rounds = 1 if sampling is None else sampling.max_rounds
        self.oversample = 1.0 if sampling is None else sampling.oversample

    def select(self, batch: Batch) -> list[SelectedGroup]:
        """Returns one result per group of a batch of complete groups. Waits for the columns `columns`."""
        return self.select_values(batch.payload(*self.columns).rows)

    def select_values(self, values: Mapping[str, Any]) -> list[SelectedGroup]:
        """Returns one result per group, given the values of `columns`.

        `scores` replaces the configured column in groups in which all values of this column are NaN. The reward of the
        column does not apply to their data sources.
        """
        column_GS, scores_GS = (
            np.asarray(values[name], dtype=np.float64).reshape(-1, self._samples) for name in (self._column, "scores")
        )
        compared_GS = np.where(np.isnan(column_GS).all(-1, keepdims=True), scores_GS, column_GS)
        failed_B = np.asarray(values[FAILED]) if self._reads_failed else np.zeros(compared_GS.size, dtype=bool)
        return list(map(self.select_group, compared_GS, failed_B.reshape(compared_GS.shape)))

    def select_group(self, scores: np.ndarray, failed: np.ndarray) -> SelectedGroup:
        """Returns the result for the rows of one group. A NaN is not compared with the other scores."""
        rows = tuple(np.flatnonzero(~failed).tolist()) if self._drops_failed else tuple(range(len(scores)))
        valid = [float(scores[row]) for row in rows if not math.isnan(scores[row])]
        measured = scores[~failed & ~np.isnan(scores)].tolist()
        success = sum(measured) / len(measured) if measured else math.nan
        reason = None
        if len(rows) < len(scores) and len(rows) < 2:
            reason = "failed"
        elif self._drops_equal and (len(valid) < 2 or min(valid) == max(valid)):
            reason = "equal_scores"
        return SelectedGroup(() if reason else rows, reason, success)


def no_groups_message(step: int, max_rounds: int, num_dropped: Mapping[str, int]) -> str:
    """Returns the error message for a step whose groups were all dropped. `num_dropped` has the number per reason."""
    most = max(num_dropped, key=lambda reason: num_dropped[reason])
    fix = "use prompts of medium difficulty or more samples_per_prompt, correct the reward, or raise "
    fix = f"{fix}dynamic_sampling.max_rounds"
    if most == "failed":
        fix = "most rewards failed, so correct the reward or its service; reward.on_failure: stop names the first cause"
    dropped = ", ".join(f"{count} {reason}" for reason, count in num_dropped.items() if count)
    return (
        f"step {step} has no group to train after {max_rounds} rounds (groups dropped since the start: "
        f"{dropped}): {fix}"
    )
