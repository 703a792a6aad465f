"""Settings of the SFT recipe."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt, model_validator

from flowrl.config import DataConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, RunConfig


class SFTConfig(RunConfig):
    """Settings of supervised fine-tuning (recipes/sft/train.py)."""

    roles: ClassVar[tuple[str, ...]] = ("actor",)

    model: ModelConfig
    """Model that is trained."""

    optimizer: OptimizerConfig
    """Settings of the optimizer, its learning rate schedule and gradient clipping."""

    lora: LoraConfig | None = None
    """Settings of a LoRA adapter; null trains all weights."""

    engine: EngineConfig = EngineConfig()
    """Settings of sharding, precision and micro-batches."""

    data: DataConfig
    """Files of conversations that end with the assistant. The validation loss is computed on `data.test`."""

    batch_size: PositiveInt
    """Number of sequences per optimizer step, over all ranks."""

    epochs: PositiveInt | None = None
    """Maximum number of passes over the training file. If null, the run ends after `steps`."""

    @classmethod
    def count_updates(cls, settings: Mapping[str, Any]) -> int | None:
        """Returns the number of steps, because a step is one update."""
        return settings["steps"]

    @property
    def can_end_early(self) -> bool:
        """Whether `epochs` may end the run before `steps`."""
        return self.epochs is not None

    @model_validator(mode="after")
    def _check_evaluation(self) -> "SFTConfig":
        if self.evaluate_every and self.data.test is None:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
        return self

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metric that ranks checkpoints: the validation loss if it is evaluated periodically, otherwise the training
        loss.
        """
        return ("validation_loss",) if self.evaluate_every else ("loss",)
