"""Advantage estimators: one class per estimator, with its settings."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from flowrl.config.algorithm.correction import CorrectionConfig, CorrectionSetting
from flowrl.config.algorithm.shaping import AnyKlControl, AnyShaping, FixedKl
from flowrl.config.base import Dependency, ImportName, KlKind, Member, OneOf, Options

Columns = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Weights = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
Discount = Annotated[float, Field(ge=0, le=1, description="Discount per token.")]


class AdvantageConfig(Member):
    """Base class of the advantage estimators, with their common settings."""

    NOUN = "an advantage estimator"
    KEY = "estimator"
    NOT_ARGUMENTS = frozenset({"correction", "shaping", "mask_truncated", "whiten", "kl_coef", "kl_kind", "kl_control"})

    IS_GROUPED: ClassVar[bool] = False
    """True if the estimator compares the samples of one prompt. Such an estimator requires at least two samples per
    prompt.
    """

    EXTRA_COLUMN: ClassVar[str | None] = None
    """Column that the estimator reads, but that no included recipe computes."""

    NEEDS_OLD_LOGPROBS: ClassVar[bool] = False
    """True if the estimator reads the log-probabilities before the update."""

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

    @property
    def applied_correction(self) -> CorrectionConfig | None:
        """Correction of the run, or None. The config of a run has already replaced `auto`."""
        return self.correction if isinstance(self.correction, CorrectionConfig) else None

    @property
    def kl_penalty(self) -> "PenalizedAdvantageConfig | None":
        """The settings of the KL penalty in the rewards; None if the estimator has none."""
        return None


class PenalizedAdvantageConfig(AdvantageConfig):
    """Base class of the estimators that can subtract a KL penalty from the rewards."""

    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty, in reward units per nat. The KL to the reference is subtracted from token rewards.
    Estimators with one score per sequence subtract the sum over the tokens of the sequence."""

    kl_kind: KlKind = "k1"
    """KL estimator: a name, or `module:function` for a user function."""

    kl_control: AnyKlControl = FixedKl()
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
    def _check_kl_control(self) -> "PenalizedAdvantageConfig":
        if self.kl_control.kind != "fixed" and not self.kl_coef:
            raise ValueError(
                f"kl_coef is 0, but kl_control {self.kl_control.kind} needs an initial value above 0: set kl_coef"
            )
        return self

    @property
    def kl_penalty(self) -> "PenalizedAdvantageConfig | None":
        return self if self.kl_coef else None


class GaeAdvantage(PenalizedAdvantageConfig):
    """Generalized advantage estimation with a critic."""

    estimator: Literal["gae"] = "gae"
    gamma: Discount = 1.0

    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda. 0 gives one-step TD errors; 1 gives the full return minus the value."""

    whiten: bool = False
    """Normalize the advantages of a step to mean 0 and variance 1 over its trained tokens."""


class GrpoAdvantage(AdvantageConfig):
    """Group-relative advantages: score minus the group mean, optionally divided by the group standard deviation."""

    IS_GROUPED = True
    estimator: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the standard deviation of the group's scores. False gives Dr. GRPO."""


class RlooAdvantage(PenalizedAdvantageConfig):
    """Leave-one-out advantages: score minus the mean of the group's other scores."""

    IS_GROUPED = True
    estimator: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(PenalizedAdvantageConfig):
    """REINFORCE++: discounted returns, normalized over the trained tokens of the batch."""

    estimator: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Discount = 1.0


class GroupAdvantage(AdvantageConfig):
    """REINFORCE++ with a group baseline, or OPO. Neither of them has settings."""

    IS_GROUPED = True
    estimator: Literal["reinforce_plus_plus_baseline", "opo"]


class RemaxAdvantage(PenalizedAdvantageConfig):
    """ReMax: score minus the score of the greedy response. Needs a recipe that stores the column `greedy_scores`; the
    included recipes reject it.
    """

    EXTRA_COLUMN = "greedy_scores"

    estimator: Literal["remax"] = "remax"

    @model_validator(mode="after")
    def _check_shaping(self) -> "RemaxAdvantage":
        if self.shaping:
            raise ValueError("shaping does not change the greedy_scores that remax subtracts: remove shaping")
        return self


class GpgAdvantage(AdvantageConfig):
    """GPG: group-relative advantages, rescaled by the fraction of groups with different scores."""

    IS_GROUPED = True
    estimator: Literal["gpg"] = "gpg"
    normalize_std: bool = False
    """Divide by the standard deviation of the group's scores."""


class PassAtKAdvantage(AdvantageConfig):
    """Advantages for pass@k. The reward of a set of k samples is the best score in the set."""

    IS_GROUPED = True
    estimator: Literal["pass_at_k"] = "pass_at_k"
    k: int | None = Field(default=None, ge=2)
    """Samples per set; null uses the group size."""

    normalize_std: bool = False
    """Divide by the standard deviation of the group's scores."""


class GdpoAdvantage(AdvantageConfig):
    """GDPO: normalizes several rewards separately per group, then sums them."""

    IS_GROUPED = True
    estimator: Literal["gdpo"] = "gdpo"
    reward_columns: Columns = ("scores",)
    """Columns with rewards. Each column has one reward per sequence."""

    reward_weights: Weights | None = None
    """Weight of each reward after normalization; null weights all rewards by 1."""

    @model_validator(mode="after")
    def _check_columns(self) -> "GdpoAdvantage":
        if self.reward_weights and len(self.reward_weights) != len(self.reward_columns):
            raise ValueError(
                f"reward_weights must have {len(self.reward_columns)} numbers, one per entry of reward_columns"
            )
        if self.shaping and self.reward_columns != ("scores",):
            raise ValueError(
                f"shaping changes the column scores only, but reward_columns is {', '.join(self.reward_columns)}: "
                f"remove shaping, or compute the shaped reward as a column"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        return {"weights": self.reward_weights}


class TokenBaselineAdvantage(PenalizedAdvantageConfig):
    """Optimal token baseline: subtracts a separate baseline at each token position, which minimizes the gradient
    variance. Needs a recipe that stores the column `sum_squared_probs`; the included recipes reject it.
    """

    IS_GROUPED = True
    EXTRA_COLUMN = "sum_squared_probs"

    NEEDS_OLD_LOGPROBS = True

    estimator: Literal["optimal_token_baseline"] = "optimal_token_baseline"


class CustomAdvantage(PenalizedAdvantageConfig):
    """User function that computes advantages.

    If the function has the parameter `values`, it must return a tuple (advantages, return targets of the critic).
    """

    NEEDS_OLD_LOGPROBS = True

    estimator: ImportName
    options: Options = Field(default_factory=dict)


AnyAdvantage = Annotated[
    GaeAdvantage
    | GrpoAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | GroupAdvantage
    | RemaxAdvantage
    | GpgAdvantage
    | PassAtKAdvantage
    | GdpoAdvantage
    | TokenBaselineAdvantage
    | CustomAdvantage,
    OneOf(),
]
