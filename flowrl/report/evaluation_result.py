"""The result of one evaluation, for tables and curves."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationResult:
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
