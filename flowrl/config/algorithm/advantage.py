"""Settings of advantage estimators, reward shaping, KL control, and corrections of off-policy rollouts."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, WrapValidator, model_validator

from flowrl.config.algorithm.declarations import Declaration
from flowrl.config.algorithm.declared_settings import DeclaredMember
from flowrl.config.base import Dependency, KlKind, OneOf, parse


class CorrectionConfig(DeclaredMember):
    """Base class of the corrections, which compare the columns `old_logprobs` (trainer) and `rollout_logprobs`
    (rollout).
    """

    NOUN = "a rollout correction"
    REGISTRY = "rollout_corrections"
    CUSTOM_MEANING = "User function that returns weights or a mask."

    kind: str
    """Name of the correction."""

    @property
    def returns_mask(self) -> bool | None:
        """Whether the correction excludes tokens instead of weighting them. None: depends on the user function."""
        return None if self.DECLARATION is None else self.DECLARATION.options.get("returns_mask", False)


AnyCorrection = Annotated[CorrectionConfig, OneOf()]


def _read_correction(value: object, _: object) -> CorrectionConfig | Literal["auto"] | None:
    # Replaces the validation of the outer union, which would add type names to the keys in error messages.
    if value is None or value == "auto":
        return None if value is None else "auto"
    if not isinstance(value, Mapping | CorrectionConfig):
        raise ValueError(f"must be auto, null, or a mapping with a kind, not {value!r}")
    return parse(AnyCorrection, value)


CorrectionSetting = Annotated[AnyCorrection | Literal["auto"] | None, WrapValidator(_read_correction)]
"""A correction, null for no correction, or `auto`."""


class ShapingConfig(DeclaredMember):
    """Base class of the reward shapings. Each maps the scores of a step to new scores."""

    NOUN = "a reward shaping"
    REGISTRY = "reward_shaping"
    CUSTOM_MEANING = "User function that returns new scores."

    kind: str
    """Name of the shaping."""


AnyShaping = Annotated[ShapingConfig, OneOf()]


class KlControlConfig(DeclaredMember):
    """Base class of the controllers that adjust `kl_coef` from step to step."""

    NOUN = "a KL control"
    REGISTRY = "kl_controls"
    CUSTOM_MEANING = "User class with the attribute `coef` and the method `update(kl, num_rows)`."

    kind: str
    """Name of the controller."""


AnyKlControl = Annotated[KlControlConfig, OneOf()]


class AdvantageConfig(DeclaredMember):
    """Base class of the advantage estimators, with their common settings."""

    NOUN = "an advantage estimator"
    KEY = "estimator"
    REGISTRY = "advantage_estimators"
    CUSTOM_MEANING = """User function that computes advantages.

    If the function has the parameter `values`, it must return a tuple (advantages, return targets of the critic).
    """

    estimator: str
    """Name of the estimator; docs/algorithms.md lists all."""

    correction: CorrectionSetting = "auto"
    """Correction for off-policy rollouts; null disables it. `auto` is `truncated` if `schedule`, `rollout.engine` or
    `rollout.quantization` makes rollouts off-policy, otherwise null. With the loss `decoupled_ppo`, `auto` is null,
    because the loss has its own importance weight. With `actor.old_logprobs: rollout`, `auto` is null, because the
    ratio of the loss then includes the weight."""

    shaping: Annotated[tuple[AnyShaping, ...], Field(strict=False)] = ()
    """Reward shapings, applied to the scores in this order. The column `scores` keeps the original scores."""

    mask_truncated: bool = False
    """Exclude truncated responses from the policy loss and its denominators (DAPO's overlong filtering). Their scores
    still count in the baseline of their group. Statistics over tokens exclude them. A critic still trains on them.
    """

    @classmethod
    def base_of(cls, declaration: Declaration | None) -> type["AdvantageConfig"]:
        is_penalized = declaration is None or declaration.options.get("kl_penalty", False)
        return PenalizedAdvantageConfig if is_penalized else AdvantageConfig

    @property
    def applied_correction(self) -> CorrectionConfig | None:
        """Correction of the run, or None. The config of a run has already replaced `auto`."""
        return self.correction if isinstance(self.correction, CorrectionConfig) else None

    @property
    def kl_penalty(self) -> "PenalizedAdvantageConfig | None":
        """The settings of the KL penalty in the rewards; None if the estimator has none."""
        return None

    @property
    def is_grouped(self) -> bool:
        """Whether the estimator compares the samples of one prompt, which requires at least two of them."""
        return "groups" in self.inputs

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the estimator reads the log-probabilities before the update. A user function may read them."""
        return self.DECLARATION is None or "logprobs" in self.inputs


class PenalizedAdvantageConfig(AdvantageConfig):
    """Base class of the estimators that can subtract a KL penalty from the rewards."""

    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty, in reward units per nat. The KL to the reference is subtracted from token rewards.
    Estimators with one score per sequence subtract the sum over the tokens of the sequence."""

    kl_kind: KlKind = "k1"
    """KL estimator: a name, or `module:function` for a user function."""

    kl_control: AnyKlControl = Field(default_factory=lambda: KlControlConfig.select("fixed"))
    """Controller that adjusts kl_coef from step to step."""

    DEPENDENCIES = (
        Dependency(
            ("kl_kind",),
            lambda group: group.kl_coef,
            "kl_coef is 0, which omits the KL penalty: set kl_coef, or remove it",
            is_error=False,
        ),
    )

    @model_validator(mode="after")
    def _check_kl_control(self) -> Self:
        if self.kl_control.kind != "fixed" and not self.kl_coef:
            raise ValueError(
                f"kl_coef is 0, but kl_control {self.kl_control.kind} needs an initial value above 0: set kl_coef"
            )
        return self

    @property
    def kl_penalty(self) -> "PenalizedAdvantageConfig | None":
        return self if self.kl_coef else None


AnyAdvantage = Annotated[AdvantageConfig, OneOf()]
