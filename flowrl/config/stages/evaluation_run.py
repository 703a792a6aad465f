"""Settings of `flowrl eval`, which evaluates models without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, field_validator

from flowrl.config.base import FilePath
from flowrl.config.model import OptimizerConfig
from flowrl.config.rewards.reward_settings import RewardConfig
from flowrl.config.roles import TrainedConfig
from flowrl.config.stages.rollouts import RolloutRunConfig


class EvaluatedModelConfig(TrainedConfig):
    """The evaluated policy. Nothing trains it, so its optimizer has no effect."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Not used."""


class EvaluationRunConfig(RolloutRunConfig):
    """Settings of an evaluation: the policy, its generation settings, the held-out data, and the rewards.

    `actor` is the evaluated policy. The settings of training have no effect.
    """

    ALTERNATIVES = ("reward", "environment")

    output: FilePath = Path("evaluation")
    """Not used."""

    steps: PositiveInt = 1
    """Not used."""

    batch_size: PositiveInt = 1
    """Not used."""

    minibatch_size: PositiveInt = 1
    """Not used."""

    evaluate_every: NonNegativeInt | None = None
    """Not used."""

    actor: EvaluatedModelConfig  # pyright: ignore[reportIncompatibleMethodOverride] (as in `OnPolicyConfig`)
    """The evaluated policy."""

    reward: RewardConfig | None = None
    """The reward. `reward.evaluation`, if set, computes the scores. Null if `environment` gives the rewards."""

    @field_validator("data", mode="before")
    @classmethod
    def _omit_training_data(cls, settings: Any) -> Any:  # Any: the settings of the file
        """Replaces `data.train`, which is required, because an evaluation reads no training data."""
        return {**settings, "train": "none"} if isinstance(settings, Mapping) else settings
