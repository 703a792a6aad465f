"""Settings of rejection sampling."""

from pydantic import PositiveInt, model_validator

from flowrl.config import RewardConfig, RolloutRunConfig, SettingValues, TrainedConfig


class RejectionSamplingConfig(RolloutRunConfig):
    """Settings of rejection sampling (recipes/rejection_sampling/train.py): best of N, then supervised fine-tuning."""

    # Required, because the recipe compares several responses.
    samples_per_prompt: PositiveInt  # pyright: ignore[reportGeneralTypeIssues] (pydantic allows it)
    """Responses per prompt, N, usually 4 to 64. A step uses batch_size / samples_per_prompt prompts."""

    keep: PositiveInt = 1
    """Number of responses per prompt on which the policy is trained. The responses with the highest scores are
    selected.
    """

    min_score: float | None = None
    """Smallest score of a response on which the policy is trained. A prompt may then have fewer than `keep` such
    responses, or none. Null is no limit.
    """

    actor: TrainedConfig
    """The policy that is trained."""

    reward: RewardConfig
    """The reward function or model that selects responses."""

    @property
    def trained_per_step(self) -> int:
        """Largest number of responses of a step on which the policy is trained."""
        return self.prompts_per_step * self.keep

    @property
    def can_end_early(self) -> bool:
        """Whether a step may have fewer updates, because responses have a score below `min_score` or are dropped."""
        return self.min_score is not None or super().can_end_early

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns steps times minibatches of the selected responses."""
        num_selected = settings["batch_size"] // settings["samples_per_prompt"] * settings["keep"]
        return settings["steps"] * -(-num_selected // settings["minibatch_size"])

    @model_validator(mode="after")
    def _check_selection(self) -> "RejectionSamplingConfig":
        samples, trained = self.samples_per_prompt, self.trained_per_step
        if samples < 2:
            raise ValueError(f"samples_per_prompt is {samples}, so every response is selected: set it to at least 2")
        if self.keep >= samples:
            raise ValueError(
                f"keep is {self.keep}, not less than samples_per_prompt, {samples}, so every response is selected: set "
                f"it to at most {samples - 1}"
            )
        if self.minibatch_size > trained:
            raise ValueError(
                f"minibatch_size is {self.minibatch_size}, but a step trains on {self.prompts_per_step} prompts x "
                f"{self.keep} responses (keep) = {trained} sequences: set it to at most {trained}"
            )
        return self
