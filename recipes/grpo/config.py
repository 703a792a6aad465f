"""Settings of the GRPO recipe."""

from pydantic import PositiveInt, model_validator

from flowrl.config import OnPolicyConfig
from flowrl.config.algorithm.advantage import PassAtKAdvantage


class GRPOConfig(OnPolicyConfig):
    """Settings of GRPO, which is PPO without a critic. The estimator compares the responses to the same prompt.

    Accepts every estimator that needs no critic.
    """

    # Required, because most estimators compare several responses.
    samples_per_prompt: PositiveInt  # pyright: ignore[reportGeneralTypeIssues] (pydantic allows it)
    """Responses per prompt, usually 4 to 16. A step uses batch_size / samples_per_prompt prompts."""

    @model_validator(mode="after")
    def _check_groups(self) -> "GRPOConfig":
        estimator = self.algorithm.estimator
        if estimator == "gae":
            raise ValueError("algorithm.estimator is gae, which needs a critic: set grpo, or use recipes.ppo")
        if self.algorithm.EXTRA_COLUMN is not None:
            raise ValueError(
                f"algorithm.estimator is {estimator}, which reads the column {self.algorithm.EXTRA_COLUMN}, but "
                f"this recipe does not compute it: set grpo, or write a recipe that stores that column"
            )
        if self.algorithm.IS_GROUPED and self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt is 1, so every advantage would be 0: set it to at least 2")
        k = self.algorithm.k if isinstance(self.algorithm, PassAtKAdvantage) else None
        if k is not None and k > self.samples_per_prompt:
            raise ValueError(
                f"algorithm.k is {k}, more than samples_per_prompt ({self.samples_per_prompt}), so every "
                f"advantage would be 0: set it to at most {self.samples_per_prompt}"
            )
        return self
