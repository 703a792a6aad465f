"""Rollouts that are not what they should be."""

from typing import Any

import numpy as np

from flowrl.config import ModelConfig, RolloutConfig
from flowrl.workers import Rollout


class Drifting(Rollout):
    """Takes every update but for one weight, which becomes a tenth larger."""

    def _load_chunk(self, weights: Any, version: int, chunk: int, num_chunks: int) -> None:  # Any: exported weights
        drifted = {n: w * np.float32(1.1) if n == "model.norm.weight" else w for n, w in weights.items()}
        super()._load_chunk(drifted, version, chunk, num_chunks)


class Hotter(Rollout):
    """Samples at another temperature than the config says."""

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        super().__init__(config.model_copy(update={"temperature": 1.5 * config.temperature}), model, seed=seed)
