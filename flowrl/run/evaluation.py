"""Evaluation: greedy answers to held-out prompts, scored."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.report.evaluation_result import EvaluationResult

NUM_SAMPLES = 8


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows, and the groups that answer and score them."""

    rollout: WorkerGroup
    reward: WorkerGroup
    rows: Sequence[dict[str, Any]]

    def measure(self, step: int) -> EvaluationResult:
        """Answers every row greedily and waits for the scores."""
        batch = Batch.from_rows([row | {"sample": 0} for row in self.rows])
        batch = batch.union(self.rollout.generate.submit(batch, greedy=True))
        batch["scores"] = self.reward.score.submit(batch, evaluation=True)
        scores, mask = batch.get("scores"), batch.get("response_mask")
        assert isinstance(scores, torch.Tensor) and isinstance(mask, torch.Tensor)
        # Spread over the set, and the same at every evaluation, so that before and after can be compared.
        places = np.linspace(0, len(batch) - 1, num=min(NUM_SAMPLES, len(batch)), dtype=np.int64)
        shown = batch.rows(places)
        texts = {name: shown.get(name) for name in ("prompt", "response", "answer")}
        samples = [
            {name: values[i] for name, values in texts.items()} | {"score": float(scores[place])}
            for i, place in enumerate(places)
        ]
        return EvaluationResult(step, float(scores.mean()), float(mask.sum()) / len(batch), len(batch), samples)


class Evaluations:
    """What each evaluation of a run found; without `use` there is none."""

    def __init__(self) -> None:
        self.outcomes: list[EvaluationResult] = []
        self._evaluation: Evaluation | None = None

    def use(self, evaluation: Evaluation) -> None:
        """Says what is evaluated."""
        self._evaluation = evaluation

    @property
    def rows(self) -> int:
        """Held-out rows of an evaluation."""
        return 0 if self._evaluation is None else len(self._evaluation.rows)

    def measure(self, step: int) -> None:
        """Evaluates once per number of steps trained. Waits for the scores."""
        if self._evaluation is not None and not self.are_of(step):
            self.outcomes.append(self._evaluation.measure(step))

    def are_of(self, step: int) -> bool:
        """Whether the last one was made after so many steps."""
        return bool(self.outcomes) and self.outcomes[-1].step == step

    def summary(self, step: int) -> dict[str, float | None]:
        """What the summary of a run of so many steps says."""
        outcomes = self.outcomes
        return {
            "accuracy_before": outcomes[0].accuracy if outcomes else None,
            "accuracy_after": outcomes[-1].accuracy if self.are_of(step) else None,
            "evaluation_rows": outcomes[-1].num_rows if outcomes else 0,
        }

    def state(self) -> list[dict[str, Any]]:
        """Plain values for a checkpoint."""
        return [asdict(outcome) for outcome in self.outcomes]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from what `state` gave."""
        self.outcomes = [EvaluationResult(**outcome) for outcome in state]
