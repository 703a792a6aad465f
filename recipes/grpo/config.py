"""Settings of the GRPO recipe."""

from pydantic import PositiveInt, model_validator

from flowrl.config import OnPolicyConfig


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
        if "greedy_scores" in self.algorithm.inputs and self.schedule.staleness > 0:
            raise ValueError(
                f"algorithm.estimator is {estimator}, which compares responses with a greedy response of the same "
                f"weights, but schedule.kind is {self.schedule.kind}: set sync, or another estimator"
            )
        if self.algorithm.is_grouped and self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt is 1, so every advantage would be 0: set it to at least 2")
        return self
