"""What is done to scores before advantages are made of them: shaping, and the control of the KL penalty."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from flowrl.config.algorithm.choice import OWN, REQUIRED, ChoiceConfig, Options, known_name

SHAPINGS: dict[str, dict[str, Any]] = {
    "overlong_penalty": {"max_length": REQUIRED, "buffer": REQUIRED, "coef": 1.0},
    "length_penalty": {"correct_from": REQUIRED, "coef": REQUIRED},
    "clip_rewards": {"low": None, "high": None},
    "normalize_rewards": {"shift_mean": False},
    OWN: {"options": {}},
}
"""Reward shaping -> its settings with their defaults. The names are those of flowrl/algorithms/registry.py."""

KL_CONTROLS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "adaptive": {"target": REQUIRED, "horizon": 10_000.0},
    OWN: {"options": {}},
}
"""KL control -> its settings with their defaults."""


class ShapingConfig(ChoiceConfig):
    """One change to the scores of a step. A setting of another kind is refused, not ignored."""

    CHOICE: ClassVar[str] = "kind"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = SHAPINGS

    kind: Annotated[str, AfterValidator(known_name("reward shaping", [name for name in SHAPINGS if name != OWN]))]
    """`overlong_penalty` punishes responses near the length limit, `length_penalty` the longer ones of a group;
    `clip_rewards` bounds the score, `normalize_rewards` divides it by the deviation of all so far; `module:function` is
    your own."""

    max_length: PositiveInt | None = None
    """overlong_penalty: response tokens from which the punishment is full."""

    buffer: PositiveInt | None = None
    """overlong_penalty: tokens before that over which it grows."""

    correct_from: float | None = None
    """length_penalty: an answer is correct from this score on."""

    coef: NonNegativeFloat | None = None
    """overlong_penalty, length_penalty: its weight in units of the score; usually 1 for overlong_penalty."""

    low: float | None = None
    """clip_rewards: the smallest score; null is no bound."""

    high: float | None = None
    """clip_rewards: the largest."""

    shift_mean: bool | None = None
    """normalize_rewards: take the mean of all scores so far off first; usually not."""

    options: Options | None = None
    """module:function: its keyword arguments."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ShapingConfig":
        if self.max_length is not None and self.buffer is not None and self.buffer > self.max_length:
            raise ValueError(f"buffer is {self.buffer}, above max_length, {self.max_length}: set it to at most that")
        if self.kind == "clip_rewards":
            if self.low is None and self.high is None:
                raise ValueError("clip_rewards has neither low nor high, and so does nothing: set one of them")
            if self.low is not None and self.high is not None and self.low >= self.high:
                raise ValueError(f"low is {self.low:g}, not below high, {self.high:g}: swap them or set them apart")
        return self


class KlControlConfig(ChoiceConfig):
    """How the coefficient of the KL penalty changes from step to step; `kl_coef` is where it starts."""

    CHOICE: ClassVar[str] = "kind"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = KL_CONTROLS

    kind: Annotated[str, AfterValidator(known_name("KL control", [name for name in KL_CONTROLS if name != OWN]))]
    """`fixed` stays; `adaptive` steers the KL towards a target; `module:Class` is your own."""

    target: PositiveFloat | None = None
    """adaptive: the KL it steers towards, in nats per response token as kl_kind estimates it."""

    horizon: PositiveFloat | None = None
    """adaptive: rows over which a KL far from its target changes the coefficient by 20 %; usually 10000."""

    options: Options | None = None
    """module:Class: its keyword arguments."""
