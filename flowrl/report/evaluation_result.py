"""The results of evaluations, for tables and curves."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of greedy responses to held-out prompts."""

    step: int
    """Number of training steps before the evaluation."""
    accuracy: float
    """Mean score of the evaluation function."""
    response_length: float
    """Mean number of tokens per response."""
    num_rows: int
    samples: list[dict[str, Any]]
    """A few rows with prompt, response, answer and score."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `metrics.jsonl`."""
        return {"accuracy": self.accuracy}


@dataclass(frozen=True)
class LossResult:
    """The loss on held-out examples."""

    step: int
    """Number of training steps before the evaluation."""
    loss: float
    """Mean cross-entropy per response token, in nats."""
    num_rows: int

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `metrics.jsonl`."""
        return {"validation_loss": self.loss}
