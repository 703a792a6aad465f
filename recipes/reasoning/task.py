"""Measure of the reasoning tasks: the share of solved problems."""

from collections.abc import Mapping

from flowrl.rewards.reasoning_gym import score


def solved(
    response: str,
    metadata: Mapping[str, object],
    answer: str | None = None,
    task: str | None = None,
    task_options: Mapping[str, object] | None = None,
    **columns: object,
) -> float:
    """Returns 1.0 if the scorer of the task gives the full score, otherwise 0.0. Many scorers give partial scores."""
    return float(score(response, metadata, answer, task, task_options) >= 1.0)
