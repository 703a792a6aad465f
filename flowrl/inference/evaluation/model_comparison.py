"""Compares the scores of several models on the same prompts: values, intervals, and paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

from flowrl.algorithms.evaluation_estimates import (
    Difference,
    Interval,
    paired_difference,
    pass_at_k,
)
from flowrl.inference.evaluation.model_scores import TaskScores
from flowrl.run.evaluation import PromptScores

SCORE = "accuracy"
"""Name of the mean score, as in the metrics of a run."""


@dataclass(frozen=True)
class TaskResult:
    """Values of one model on one task, with 95 % bootstrap intervals over prompts."""

    model: str
    task: str
    num_prompts: int
    num_samples: int
    score: Interval
    """Mean score. The metrics of a run call it `accuracy`."""
    estimates: Mapping[str, Interval] = field(default_factory=dict)
    """Estimates `pass@k`, `best@k` and `majority@k` by name. Empty with one response per prompt."""
    sources: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """Data source -> name -> value: the mean score (`accuracy`) and the estimates of the data source. Empty if all
    prompts have the same data source.
    """
    difference: Difference | None = None
    """Mean score minus the mean score of the first model, over the prompts with scores of both models. None for the
    first model, if the prompts differ, or if there are no such prompts.
    """
    num_compared: int | None = None
    """Number of prompts in `difference`; None without a difference."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the evaluation, `evaluation/...`."""

    def to_json(self) -> dict[str, Any]:  # Any: values of JSON
        return asdict(self)


def compare(scores: Mapping[str, Mapping[str, TaskScores]]) -> list[TaskResult]:
    """Returns the values of each model on each task, in the order of tasks, and then of models.

    `scores` maps model -> task -> scores. The first model is the baseline of the differences.
    """
    baseline = next(iter(scores.values()), {})
    tasks = dict.fromkeys(task for own in scores.values() for task in own)
    return [
        _summarize(model, task, own[task], None if own is baseline else baseline.get(task))
        for task in tasks
        for model, own in scores.items()
        if task in own
    ]


def _summarize(model: str, task: str, own: TaskScores, baseline: TaskScores | None) -> TaskResult:
    scores = own.scores
    num_prompts, num_samples = scores.scores_PN.shape
    value = own.metrics[SCORE]
    metrics = {name: number for name, number in own.metrics.items() if name.startswith("evaluation/")}
    metrics = {name: number for name, number in metrics.items() if not name.startswith("evaluation/accuracy_")}
    if not scores.is_scored:
        without_interval = Interval(value, float("nan"), float("nan"))
        return TaskResult(model, task, num_prompts, num_samples, without_interval, metrics=metrics)
    interval = scores.interval(scores.means())
    sources = dict.fromkeys(scores.strata or ())
    difference, num_compared = (None, None) if baseline is None else _compare_prompts(own, baseline)
    return TaskResult(
        model,
        task,
        num_prompts,
        num_samples,
        Interval(value, interval.low, interval.high),
        _intervals(scores, own.pass_score),
        {str(source): _source_intervals(scores.of_source(source), own.pass_score) for source in sources},
        difference,
        num_compared,
        metrics,
    )


def _source_intervals(scores: PromptScores, pass_score: float) -> dict[str, Interval]:
    return {SCORE: scores.interval(scores.means()), **_intervals(scores, pass_score)}


def _intervals(scores: PromptScores, pass_score: float) -> dict[str, Interval]:
    """Returns each estimate by name.

    `pass@k` is estimated for each k that is a power of 2 up to the number of samples, and for the number of samples.
    """
    scores_PN = scores.scores_PN
    num_samples = scores_PN.shape[1]
    powers = [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples]
    estimates = {f"pass@{k}": pass_at_k(scores_PN, k, min_score=pass_score) for k in powers}
    estimates |= scores.estimate(pass_score)
    return {name: scores.interval(values_P) for name, values_P in estimates.items()}


def _compare_prompts(own: TaskScores, baseline: TaskScores) -> tuple[Difference | None, int | None]:
    """Returns the paired difference to the baseline over the prompts with scores of both models, and the number of such
    prompts. Returns (None, None) if the prompts differ, or if there are no such prompts.
    """
    if list(own.prompts) != list(baseline.prompts):
        return None, None
    values_P, others_P = own.scores.means(), baseline.scores.means()
    both_P = ~(values_P.isnan() | others_P.isnan())
    if not both_P.any():
        return None, None
    strata = None if own.scores.strata is None else list(compress(own.scores.strata, both_P.tolist()))
    return paired_difference(values_P[both_P], others_P[both_P], strata=strata), int(both_P.sum())


def prompt_records(own: TaskScores) -> Sequence[dict[str, Any]]:  # Any: values of JSON
    """Returns one record per prompt: its text, its data source, and the score of each response (NaN if missing)."""
    scores = own.scores
    answers = scores.answers or [None] * len(own.prompts)
    columns = zip(scores.prompt_ids, own.prompts, scores.sources, scores.scores_PN.tolist(), answers, strict=True)
    return [
        {"prompt_id": prompt_id, "prompt": prompt, "data_source": source, "scores": row}
        | ({} if answer is None else {"answers": list(answer)})
        for prompt_id, prompt, source, row, answer in columns
    ]
