"""What a GRPO run may set."""

from pydantic import model_validator

from flowrl.config import OnPolicyConfig


class GRPOConfig(OnPolicyConfig):
    """PPO's update without a critic: a response is compared with others to its prompt. See recipes/grpo/train.py.

    Every estimator that needs no critic runs in it.
    """

    @model_validator(mode="after")
    def _check_groups(self) -> "GRPOConfig":
        estimator = self.algorithm.estimator
        if estimator == "gae":
            raise ValueError("algorithm.estimator is gae, which needs a critic: set grpo, or use recipes.ppo")
        if estimator in self.algorithm.COLUMNS:
            raise ValueError(
                f"algorithm.estimator is {estimator}, which reads the column {self.algorithm.COLUMNS[estimator]}, and "
                f"this recipe computes none: set grpo, or store that column in a recipe of your own"
            )
        if estimator in self.algorithm.GROUPED and self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt is 1, so every advantage would be 0: set it to 2 or more")
        if self.algorithm.k is not None and self.algorithm.k > self.samples_per_prompt:
            raise ValueError(
                f"algorithm.k is {self.algorithm.k}, more than samples_per_prompt, {self.samples_per_prompt}, so every "
                f"advantage would be 0: set it to at most that"
            )
        return self
