"""Evaluation: greedy answers to held-out prompts, scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowrl.controller.group import WorkerGroup
from flowrl.data.batch import Batch

NUM_SAMPLES = 8


@dataclass(frozen=True)
class Outcome:
    """What one evaluation found."""

    step: int
    """Steps trained before it."""
    accuracy: float
    """Mean score of the evaluation function."""
    response_length: float
    """Mean tokens of a response."""
    num_rows: int
    samples: list[dict[str, Any]]
    """A few rows: prompt, response, answer and score."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows, and the groups that answer and score them."""

    rollout: WorkerGroup
    reward: WorkerGroup
    rows: Sequence[dict[str, Any]]

    def measure(self, step: int) -> Outcome:
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
        return Outcome(step, float(scores.mean()), float(mask.sum()) / len(batch), len(batch), samples)
