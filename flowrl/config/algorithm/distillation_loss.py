"""Losses of distillation, which train a policy (the student) to agree with a frozen policy (the teacher)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from flowrl.config.base import ImportName, Member, OneOf, Options

NumCandidates = Annotated[
    PositiveInt, Field(description="Number of most likely tokens of the teacher whose probabilities are compared.")
]


class DistillationLossConfig(Member):
    """Base class of distillation losses. Usage:
    `distillation_losses.load(loss.kind)(**columns, **loss.arguments())`.
    """

    NOUN = "a distillation loss"

    NOT_ARGUMENTS = frozenset({"k"})

    READS_SAMPLES: ClassVar[bool] = False
    """Whether the loss is an expectation over tokens that the student samples."""

    kind: str
    """Name of the loss."""

    @property
    def num_candidates(self) -> int:
        """Number of the teacher's most likely tokens that the loss reads; 0 if it reads none."""
        return 0


class SampledReverseKlLoss(DistillationLossConfig):
    """KL from the student to the teacher, estimated from the sampled tokens."""

    READS_SAMPLES = True

    kind: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"
    max_weight: PositiveFloat = 2.0
    """Largest importance weight of a token: its probability under the student divided by that at sampling time."""


class TopkForwardKlLoss(DistillationLossConfig):
    """KL from the teacher to the student, over the teacher's most likely tokens and all other tokens together."""

    kind: Literal["topk_forward_kl"] = "topk_forward_kl"
    k: NumCandidates = 64

    @property
    def num_candidates(self) -> int:
        return self.k


class CustomDistillationLoss(DistillationLossConfig):
    """User function that returns a loss per token, and metrics."""

    kind: ImportName
    k: NumCandidates = 64
    options: Options = Field(default_factory=dict)

    @property
    def num_candidates(self) -> int:
        return self.k


AnyDistillation = Annotated[
    SampledReverseKlLoss | TopkForwardKlLoss | CustomDistillationLoss,
    OneOf(default="sampled_reverse_kl", allows_bare_name=True),
]
