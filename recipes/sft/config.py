"""What a supervised fine-tuning run may set."""

from typing import ClassVar

from pydantic import PositiveInt

from flowrl.config import DataConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, RunConfig


class SFTConfig(RunConfig):
    """Cross-entropy on the answers of a file: see recipes/sft/train.py."""

    roles: ClassVar[tuple[str, ...]] = ("actor",)

    model: ModelConfig
    """Weights to start from."""

    optimizer: OptimizerConfig
    """How they are updated."""

    lora: LoraConfig | None = None
    """Trains an adapter and no other weight; null trains all of them."""

    engine: EngineConfig = EngineConfig()
    """How the model runs."""

    data: DataConfig
    """Conversations to imitate."""

    batch_size: PositiveInt
    """Sequences of one optimizer step, over all ranks."""

    epochs: PositiveInt | None = None
    """Passes over the training file after which the run ends even if `steps` are left; null is no limit."""
