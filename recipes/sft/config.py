"""Settings of the SFT recipe."""

from typing import ClassVar

from pydantic import PositiveInt, model_validator

from flowrl.config import DataConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, RunConfig


class SFTConfig(RunConfig):
    """Supervised fine-tuning: see recipes/sft/train.py."""

    roles: ClassVar[tuple[str, ...]] = ("actor",)

    model: ModelConfig
    """The initial model."""

    optimizer: OptimizerConfig
    """The optimizer, its learning rate schedule and gradient clipping."""

    lora: LoraConfig | None = None
    """Trains only a LoRA adapter; null trains all weights."""

    engine: EngineConfig = EngineConfig()
    """Sharding, precision and micro-batches of the model."""

    data: DataConfig
    """Conversations that end with the assistant; `data.test` gives the validation loss."""

    batch_size: PositiveInt
    """Number of sequences per optimizer step, over all ranks."""

    epochs: PositiveInt | None = None
    """Maximal number of passes over the training file; null is no limit, so `steps` ends the run."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> "SFTConfig":
        if self.evaluate_every and self.data.test is None:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
        return self

    @property
    def compared_by(self) -> tuple[str, ...]:
        """The metric that ranks checkpoints: the validation loss if it is evaluated regularly, else the loss."""
        return ("validation_loss",) if self.evaluate_every else ("loss",)
