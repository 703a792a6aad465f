"""Rollouts with a wrong weight or temperature."""

from typing import Any

import numpy as np

from flowrl.config import ModelConfig, RolloutConfig
from flowrl.workers import Rollout


class Drifting(Rollout):
    """Loads updates with one weight increased by a tenth."""

    def _load_bucket(self, weights: Any, num_bytes: int, version: int, bucket: int, num_buckets: int) -> None:
        drifted = {n: w * np.float32(1.1) if n == "model.norm.weight" else w for n, w in weights.items()}
        super()._load_bucket(drifted, num_bytes, version, bucket, num_buckets)


class Hotter(Rollout):
    """Samples at a different temperature than the configured one."""

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        super().__init__(config.model_copy(update={"temperature": 1.5 * config.temperature}), model, seed=seed)
