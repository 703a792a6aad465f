"""Corrections of off-policy rollouts. They use the ratio of the trainer's to the rollout's token probabilities."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, WrapValidator, model_validator

from flowrl.config.base import ImportName, Member, OneOf, Options, parse


class CorrectionConfig(Member):
    """Base class of the corrections, which compare the columns `old_logprobs` (trainer) and `rollout_logprobs`
    (rollout).
    """

    NOUN = "a rollout correction"

    kind: str
    """Name of the correction."""


class WeightCorrection(CorrectionConfig):
    """Multiplies each token's policy loss by an importance ratio, which is limited to [min_weight, max_weight]."""

    NOT_ARGUMENTS = frozenset({"normalize"})

    kind: Literal["truncated", "masked"]
    """`truncated` clips ratios outside the limits; `masked` sets them to 0."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Level of the ratio: of each token, of its sequence (product), or the geometric mean over its sequence."""

    max_weight: PositiveFloat = 2.0
    """Upper bound of the ratio."""

    min_weight: NonNegativeFloat = 0.0
    """Lower bound of the ratio."""

    normalize: bool = False
    """Divide the weights by their mean over the trained tokens of the step, so that the weights do not change the scale
    of the gradient.
    """

    @model_validator(mode="after")
    def _check_bounds(self) -> "WeightCorrection":
        if self.min_weight > self.max_weight:
            raise ValueError(f"min_weight is {self.min_weight:g}, above max_weight, {self.max_weight:g}: swap them")
        return self


class RejectionCorrection(CorrectionConfig):
    """Excludes tokens or sequences from the loss if their estimate of KL(rollout || policy) is outside [low, high]."""

    kind: Literal["rejection"] = "rejection"

    rejection_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "sequence_mean"
    """Quantity that must be within [low, high]: each token's estimate, or the sum, mean or maximum over a sequence."""

    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """KL estimator."""

    high: float
    """Upper bound of the estimate, in nats."""

    low: float | None = None
    """Lower bound of the estimate, in nats, only for k1; null disables it."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "RejectionCorrection":
        if self.low is not None and self.kl_kind != "k1":
            raise ValueError(
                f"low applies only to k1, because {self.kl_kind} is never negative: remove low, or set kl_kind: k1"
            )
        if self.low is not None and self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high, {self.high:g}: swap them")
        return self

    def arguments(self) -> dict[str, Any]:
        bounds = {} if self.low is None else {"low": self.low}
        return {"kind": self.kl_kind, "level": self.rejection_level, "high": self.high} | bounds


class CustomCorrection(CorrectionConfig):
    """User function that returns weights or a mask."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyCorrection = Annotated[WeightCorrection | RejectionCorrection | CustomCorrection, OneOf()]


def _read_correction(value: object, _: object) -> AnyCorrection | Literal["auto"] | None:
    # Replaces the validation of the outer union, which would add type names to the keys in error messages.
    if value is None or value == "auto":
        return None if value is None else "auto"
    if not isinstance(value, Mapping | CorrectionConfig):
        raise ValueError(f"must be auto, null, or a mapping with a kind, not {value!r}")
    return parse(AnyCorrection, value)


CorrectionSetting = Annotated[AnyCorrection | Literal["auto"] | None, WrapValidator(_read_correction)]
"""A correction, null for no correction, or `auto`."""
