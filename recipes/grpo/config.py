"""What a GRPO run may set."""

from pydantic import model_validator

from flowrl.config import OnPolicyConfig


class GRPOConfig(OnPolicyConfig):
    """PPO's update without a critic: a response is compared with others to its prompt. See recipes/grpo/train.py."""

    @model_validator(mode="after")
    def _check_groups(self) -> "GRPOConfig":
        if self.algorithm.estimator != "grpo":
            raise ValueError(
                f"algorithm.estimator is {self.algorithm.estimator}, which needs a critic: set grpo, or use recipes.ppo"
            )
        if self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt is 1, so every advantage would be 0: set it to 2 or more")
        return self
