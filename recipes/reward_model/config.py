"""Settings of the training of a reward model."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from flowrl.config import Config, EpochConfig, RewardModelConfig


class AcceptanceConfig(Config):
    """Acceptance criteria of the trained reward model, for the last evaluation on `data.test`."""

    min_accuracy: float = Field(default=0.6, ge=0, lt=1)
    """The fraction of pairs whose chosen response has the higher score must exceed this value. In addition, the mean
    score of the chosen responses must exceed the mean score of the rejected responses.
    """

    on_failure: Literal["warn", "fail"] = "warn"
    """Reaction to a model that does not meet the criteria: log a warning, or end the program with exit code 1. The
    model is saved in both cases.
    """

    def find_problem(self, summary: Mapping[str, float | None]) -> str | None:
        """Returns an error message if the held-out metrics in the summary of a run violate a criterion, or None."""
        accuracy, chosen, rejected = (
            summary.get(f"{name}_after")
            for name in ("accuracy", "evaluation/chosen_reward", "evaluation/rejected_reward")
        )
        if accuracy is None or chosen is None or rejected is None:
            return None
        # NaN violates both criteria.
        if not accuracy > self.min_accuracy:
            return f"its held-out accuracy is {accuracy:.3f}, not above acceptance.min_accuracy, {self.min_accuracy:g}"
        if not chosen > rejected:
            return (
                f"the mean score of the chosen responses, {chosen:.3f}, is not above that of the rejected responses, "
                f"{rejected:.3f}"
            )
        return None


class RewardModelRunConfig(EpochConfig):
    """Settings of the training of a reward model (recipes/reward_model/train.py). The training file has
    preference pairs.
    """

    batch_size: PositiveInt
    """Pairs per step, over all ranks."""

    reward: RewardModelConfig
    """The reward model that is trained, and its loss."""

    acceptance: AcceptanceConfig = AcceptanceConfig()
    """Criteria for the trained model."""

    @model_validator(mode="after")
    def _check_acceptance(self) -> "RewardModelRunConfig":
        if self.acceptance.on_failure == "fail" and (self.data.test is None or self.evaluate_every == 0):
            raise ValueError("acceptance.on_failure is fail, but nothing is evaluated: set data.test, or set warn")
        return self

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metric that ranks checkpoints."""
        return ("accuracy",) if self.evaluate_every else ("reward/loss",)
