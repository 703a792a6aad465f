"""Settings of policy losses, preference losses, reward model losses and distillation losses.

docs/algorithms.md has the formulas.
"""

from typing import Annotated

from pydantic import Field, PositiveInt

from flowrl.config.algorithm.declarations import Declaration
from flowrl.config.algorithm.declared_settings import DeclaredMember
from flowrl.config.base import OneOf


class PolicyLossConfig(DeclaredMember):
    """Base class of the policy losses."""

    NOUN = "a policy loss"
    REGISTRY = "policy_losses"
    CUSTOM_MEANING = "User function that returns a loss per token, and metrics."

    kind: str
    """Name of the loss."""

    @property
    def weights_rollouts(self) -> bool:
        """Whether the loss weights tokens by the ratio to the policy of the rollout, as a correction does."""
        return "behavior_logprobs" in self.inputs

    @property
    def prepares_columns(self) -> bool:
        """Whether the task worker prepares a column of the loss from the log-probabilities before the update."""
        return self.weights_rollouts or (self.DECLARATION is not None and self.DECLARATION.has_prepared)


AnyPolicyLoss = Annotated[PolicyLossConfig, OneOf(default="ppo", allows_bare_name=True)]


class PreferenceConfig(DeclaredMember):
    """Base class of preference losses."""

    NOUN = "a preference loss"
    REGISTRY = "preference_losses"
    CUSTOM_MEANING = "User function that returns a loss per pair, and metrics."

    kind: str
    """Name of the loss."""

    @property
    def is_paired(self) -> bool:
        """Whether the loss reads pairs. False: it reads single labeled responses."""
        return "desirable" not in self.inputs

    @property
    def needs_reference(self) -> bool | None:
        """Whether the loss reads the log-probabilities of a reference. None: depends on the user function."""
        return None if self.DECLARATION is None else any(name.startswith("ref_") for name in self.inputs)


AnyPreference = Annotated[PreferenceConfig, OneOf(default="dpo", allows_bare_name=True)]


class RewardModelLossConfig(DeclaredMember):
    """Base class of the losses of reward models."""

    NOUN = "a reward model loss"
    REGISTRY = "reward_model_losses"
    CUSTOM_MEANING = "User function of the scores that returns a loss per pair, and metrics."

    kind: str
    """Name of the loss."""


AnyRewardModelLoss = Annotated[RewardModelLossConfig, OneOf(default="log_sig", allows_bare_name=True)]


class DistillationLossConfig(DeclaredMember):
    """Base class of distillation losses, which train a policy (the student) to agree with a frozen policy (the
    teacher).
    """

    NOUN = "a distillation loss"
    REGISTRY = "distillation_losses"
    CUSTOM_MEANING = "User function that returns a loss per token, and metrics."

    kind: str
    """Name of the loss."""

    @classmethod
    def base_of(cls, declaration: Declaration | None) -> type["DistillationLossConfig"]:
        reads_candidates = declaration is None or "topk_logprobs" in declaration.inputs
        return CandidateLossConfig if reads_candidates else DistillationLossConfig

    @property
    def num_candidates(self) -> int:
        """Number of the teacher's most likely tokens that the loss reads; 0 if it reads none."""
        return 0

    @property
    def reads_samples(self) -> bool:
        """Whether the loss is an expectation over tokens that the student samples."""
        return "teacher_logprobs" in self.inputs


class CandidateLossConfig(DistillationLossConfig):
    """Base class of the losses that compare the probabilities of the teacher's most likely tokens."""

    k: PositiveInt = Field(
        default=64, description="Number of most likely tokens of the teacher whose probabilities are compared."
    )

    @property
    def num_candidates(self) -> int:
        return self.k


AnyDistillation = Annotated[DistillationLossConfig, OneOf(default="sampled_reverse_kl", allows_bare_name=True)]
