"""Reward shaping, and the controllers of the KL coefficient."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import ImportName, Member, OneOf, Options


class ShapingConfig(Member):
    """Base class of the reward shapings. Each maps the scores of a step to new scores."""

    NOUN = "a reward shaping"

    kind: str
    """Name of the shaping."""


class OverlongPenalty(ShapingConfig):
    """Subtracts a penalty from responses close to the length limit (DAPO). The length includes the tokens of an
    environment, as in `rollout.max_response_tokens`.
    """

    kind: Literal["overlong_penalty"] = "overlong_penalty"
    max_length: PositiveInt
    """Response length in tokens from which the full penalty applies, usually `rollout.max_response_tokens`."""

    buffer: PositiveInt
    """Number of tokens before max_length over which the penalty grows linearly from 0."""

    coef: NonNegativeFloat = 1.0
    """Full penalty, in units of the score."""

    @model_validator(mode="after")
    def _check_buffer(self) -> "OverlongPenalty":
        if self.buffer > self.max_length:
            raise ValueError(f"buffer is {self.buffer}, above max_length: set it to at most {self.max_length}")
        return self


class LengthPenalty(ShapingConfig):
    """Adds a length reward within each group: short correct responses gain and long responses lose (Kimi k1.5). The
    length includes the tokens of an environment.
    """

    kind: Literal["length_penalty"] = "length_penalty"
    correct_from: float
    """Smallest score of a correct response."""

    coef: NonNegativeFloat
    """Weight of the length reward, in units of the score."""


class ClipRewards(ShapingConfig):
    """Clips scores to [low, high]."""

    kind: Literal["clip_rewards"] = "clip_rewards"
    low: float | None = None
    """Lower bound of the scores; null disables it."""

    high: float | None = None
    """Upper bound of the scores; null disables it."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ClipRewards":
        if self.low is None and self.high is None:
            raise ValueError("clip_rewards has neither low nor high and would have no effect: set at least one")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low is {self.low:g}, but must be below high, {self.high:g}")
        return self


class NormalizeRewards(ShapingConfig):
    """Divides scores by their running standard deviation over all steps."""

    kind: Literal["normalize_rewards"] = "normalize_rewards"
    shift_mean: bool = False
    """Also subtract the running mean."""


class CustomShaping(ShapingConfig):
    """User function that returns new scores."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyShaping = Annotated[OverlongPenalty | LengthPenalty | ClipRewards | NormalizeRewards | CustomShaping, OneOf()]


class KlControlConfig(Member):
    """Base class of the controllers that adjust `kl_coef` from step to step."""

    NOUN = "a KL control"

    kind: str
    """Name of the controller."""


class FixedKl(KlControlConfig):
    """Keeps `kl_coef` constant."""

    kind: Literal["fixed"] = "fixed"


class AdaptiveKl(KlControlConfig):
    """Adjusts `kl_coef` so that the measured KL approaches a target."""

    kind: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """Target KL in nats per response token, estimated with kl_kind."""

    horizon: PositiveFloat = 10_000.0
    """Number of sequences. A step with `horizon` sequences changes the coefficient by at most 20 %. A larger horizon
    slows the adjustment.
    """


class CustomKl(KlControlConfig):
    """User class with the attribute `coef` and the method `update(kl, num_rows)`."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyKlControl = Annotated[FixedKl | AdaptiveKl | CustomKl, OneOf()]
