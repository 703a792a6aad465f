"""Advantage estimators: one class per estimator, with the settings that it uses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from flowrl.config.algorithm.correction import CorrectionConfig, CorrectionSetting
from flowrl.config.algorithm.shaping import AnyKlControl, AnyShaping, FixedKl
from flowrl.config.base import ImportName, KlKind, Member, OneOf, Options

Columns = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Weights = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
Discount = Annotated[float, Field(ge=0, le=1, description="Discount per token.")]


class AdvantageConfig(Member):
    """Base class of the advantage estimators, with the settings that all of them share."""

    KEY = "estimator"
    NOT_ARGUMENTS = frozenset({"correction", "shaping", "whiten", "kl_coef", "kl_kind", "kl_control"})

    IS_GROUPED: ClassVar[bool] = False
    """True if the estimator compares the samples of one prompt and so needs at least two."""

    EXTRA_COLUMN: ClassVar[str | None] = None
    """Column that the estimator reads and that no included recipe computes."""

    estimator: str
    """Name of the estimator; docs/algorithms.md lists all."""

    correction: CorrectionSetting = "auto"
    """Correction for off-policy rollouts; null applies none. `auto` is `truncated` if `schedule`, `rollout.engine` or
    `rollout.quantization` causes a difference, else null. It is null for `decoupled_ppo`, which has the weight."""

    shaping: Annotated[tuple[AnyShaping, ...], Field(strict=False)] = ()
    """Reward shapings, applied to the scores in this order. The column `scores` keeps the original values."""

    @property
    def applied_correction(self) -> CorrectionConfig | None:
        """The correction, or None. A run's config resolves `auto` before this is read."""
        return self.correction if isinstance(self.correction, CorrectionConfig) else None

    @property
    def kl_penalty(self) -> "PenalizedAdvantageConfig | None":
        """These settings if a KL penalty is subtracted from the rewards, else None."""
        return None


class PenalizedAdvantageConfig(AdvantageConfig):
    """Base class of the estimators that can subtract a KL penalty from the rewards."""

    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference that is subtracted from token rewards, in reward units per nat.
    Estimators that read one score per sequence subtract the sum over its tokens."""

    kl_kind: KlKind = "k1"
    """KL estimator; `module:function` is a user function."""

    kl_control: AnyKlControl = FixedKl()
    """Controller that adjusts kl_coef from step to step."""

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
    """GAE lambda: 0 uses the critic's next value, 1 the full return."""

    whiten: bool = False
    """Normalize the advantages of a step to mean 0 and variance 1 over its tokens."""


class GrpoAdvantage(AdvantageConfig):
    """Group-relative advantages: score minus the group mean, optionally divided by the group standard deviation."""

    IS_GROUPED = True
    estimator: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the standard deviation of the group's scores; false is Dr. GRPO."""


class RlooAdvantage(PenalizedAdvantageConfig):
    """Leave-one-out advantages: score minus the mean of the group's other scores."""

    IS_GROUPED = True
    estimator: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(PenalizedAdvantageConfig):
    """REINFORCE++: discounted returns, normalized over the batch."""

    estimator: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Discount = 1.0


class GroupAdvantage(AdvantageConfig):
    """REINFORCE++ with a group baseline, or OPO. Neither has settings."""

    IS_GROUPED = True
    estimator: Literal["reinforce_plus_plus_baseline", "opo"]


class RemaxAdvantage(PenalizedAdvantageConfig):
    """ReMax: score minus the score of the greedy response."""

    EXTRA_COLUMN = "greedy_scores"

    estimator: Literal["remax"] = "remax"

    @model_validator(mode="after")
    def _check_shaping(self) -> "RemaxAdvantage":
        if self.shaping:
            raise ValueError("shaping does not change the greedy_scores that remax subtracts: remove shaping")
        return self


class GpgAdvantage(AdvantageConfig):
    """GPG: group-relative advantages, rescaled by the share of informative groups."""

    IS_GROUPED = True
    estimator: Literal["gpg"] = "gpg"
    normalize_std: bool = False
    """Divide by the standard deviation of the group's scores."""


class PassAtKAdvantage(AdvantageConfig):
    """Advantages for pass@k: the reward of a set of k samples is its best score."""

    IS_GROUPED = True
    estimator: Literal["pass_at_k"] = "pass_at_k"
    k: int | None = Field(default=None, ge=2)
    """Samples per set; null is the group size."""


class GdpoAdvantage(AdvantageConfig):
    """GDPO: normalizes several rewards separately per group, then sums them."""

    IS_GROUPED = True
    estimator: Literal["gdpo"] = "gdpo"
    reward_columns: Columns = ("scores",)
    """Columns with one reward per sequence each."""

    reward_weights: Weights | None = None
    """Weight of each reward after normalization; null is 1 for all."""

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
    """Optimal token baseline: subtracts a baseline per token position that minimizes the gradient variance."""

    IS_GROUPED = True
    EXTRA_COLUMN = "sum_squared_probs"

    estimator: Literal["optimal_token_baseline"] = "optimal_token_baseline"


class CustomAdvantage(PenalizedAdvantageConfig):
    """A user function that returns advantages, or advantages and returns."""

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
