"""Evaluation during a run: the score of greedy responses, or the loss on held-out examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from tensordict import TensorDict

from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.report.progress import EvaluationResult, LossResult
from flowrl.report.rollout_log import Row
from flowrl.run.rollout_rows import collect_rows


class Evaluation(Protocol):
    """Measures the current model on held-out data."""

    unit: ClassVar[str]

    @property
    def num_rows(self) -> int: ...

    def measure(self, step: int) -> EvaluationResult | LossResult: ...


@dataclass(frozen=True)
class GreedyEvaluation:
    """Scores greedy responses to held-out prompts."""

    unit: ClassVar[str] = "prompts"
    rollout: WorkerGroup
    reward: WorkerGroup
    rows: Sequence[dict[str, Any]]
    save_rows: Callable[[int, Sequence[Row]], None] | None = None
    """Saves the responses of a step; None discards them."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def measure(self, step: int) -> EvaluationResult:
        """Generates and scores one response per prompt. Blocks until the scores are available."""
        batch = Batch.from_rows([row | {"sample": 0} for row in self.rows])
        batch = batch.union(self.rollout.generate.submit(batch, greedy=True))
        batch["scores"] = self.reward.score.submit(batch, evaluation=True)
        scores, mask = batch.get("scores"), batch.get("response_mask")
        assert isinstance(scores, torch.Tensor) and isinstance(mask, torch.Tensor)
        if self.save_rows is not None:
            self.save_rows(step, collect_rows(batch).get())
        return EvaluationResult(step, float(scores.mean()), float(mask.sum()) / len(batch), len(batch))


@dataclass(frozen=True)
class LossEvaluation:
    """Computes the mean cross-entropy per response token of held-out examples."""

    unit: ClassVar[str] = "examples"
    actor: WorkerGroup
    batch: Batch

    @property
    def num_rows(self) -> int:
        return len(self.batch)

    def measure(self, step: int) -> LossResult:
        """Runs a forward pass over all examples. Blocks until the loss is available."""
        batch = self.batch.union(self.actor.logprobs.submit(self.batch))
        return LossResult(step, batch.reduce(mean_loss, ("logprobs", "response_mask")).get(), len(batch))


def mean_loss(table: TensorDict) -> float:
    """Returns the mean negative log-probability of the response tokens. Runs on the task worker."""
    return -float(table["tokens", "logprobs"][table["tokens", "response_mask"]].double().mean())


class Evaluations:
    """The evaluation of a run, and its first and last result. The results are empty if `evaluation` is None."""

    def __init__(self) -> None:
        self.evaluation: Evaluation | None = None
        self.results: list[EvaluationResult | LossResult] = []
        """The first and the last result. The metrics file has the others."""

    def measure(self, step: int) -> None:
        """Evaluates the model after a step, unless the step is already evaluated."""
        if self.evaluation is not None and not self.has_result_of(step):
            self.results = [*self.results[:1], self.evaluation.measure(step)]

    def has_result_of(self, step: int) -> bool:
        return bool(self.results) and self.results[-1].step == step

    def summary(self, step: int) -> dict[str, float | None]:
        """Returns the entries of `summary.json`. `step` is the last step of the run."""
        name = "validation_loss" if isinstance(self.evaluation, LossEvaluation) else "accuracy"
        before = self.results[0].metrics[name] if self.results else None
        after = self.results[-1].metrics[name] if self.has_result_of(step) else None
        return {
            f"{name}_before": before,
            f"{name}_after": after,
            "evaluation_rows": self.results[-1].num_rows if self.results else 0,
        }

    def state(self) -> list[dict[str, Any]]:
        """Returns the results as plain values for a checkpoint."""
        return [asdict(result) for result in self.results]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        # Earlier versions of flowrl stored all results, and responses in them.
        results = [_restore_result(values) for values in state]
        self.results = [*results[:1], *results[1:][-1:]]


def _restore_result(values: Mapping[str, Any]) -> EvaluationResult | LossResult:
    cls = LossResult if "loss" in values else EvaluationResult
    return cls(**{field.name: values[field.name] for field in fields(cls)})
