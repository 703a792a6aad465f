"""Scores rows in one process of a pool."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.rewards.reward_function import FunctionSpec, RewardError


def score_in_process(name: str, rows: Sequence[Mapping[str, Any]], timeout_s: float | None) -> list[float]:
    """Returns the scores of the rows by the reward function `name`, computed in a new process with network access.

    Raises RewardError for the first row without a score, or if the import or a call takes longer than `timeout_s`
    (None: no limit). After a timeout, the error names the current function and line. All processes that the function
    has started are ended.
    """
    limits = PoolLimits(workers=1, timeout_s=timeout_s, allow_network=True, load_timeout_s=timeout_s)
    scores = []
    with ScoringPool([FunctionSpec(name, name)], limits) as pool:
        for future in [pool.submit(name, row) for row in rows]:
            outcome = future.result()
            if outcome.score is None:
                fix = ": make it faster, or increase call_timeout_s" if outcome.failure == "timeout" else ""
                raise RewardError(f"{outcome.message}{fix}")
            scores.append(outcome.score)
    return scores
