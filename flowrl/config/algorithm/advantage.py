"""From scores to advantages, and what is done about rollouts that another policy sampled."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, WrapValidator, model_validator

from flowrl.config.algorithm.choice import OWN, REQUIRED, ChoiceConfig, KlKind, Options, known_name
from flowrl.config.algorithm.shaping import KlControlConfig, ShapingConfig

_KL: dict[str, Any] = {"kl_coef": 0.0, "kl_kind": "k1", "kl_control": {"kind": "fixed"}}

ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 1.0, "lam": 1.0, "whiten": False} | _KL,
    "grpo": {"normalize_std": True},
    "rloo": _KL,
    "reinforce_plus_plus": {"gamma": 1.0} | _KL,
    "reinforce_plus_plus_baseline": {},
    "remax": _KL,
    "opo": {},
    "gpg": {"normalize_std": False},
    "pass_at_k": {"k": None},
    "gdpo": {"reward_columns": ("scores",), "reward_weights": None},
    "optimal_token_baseline": _KL,
    OWN: _KL | {"options": {}},
}
"""Estimator -> its settings with their defaults. The names are those of flowrl/algorithms/registry.py."""

CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated": {"level": "token", "max_weight": 2.0, "min_weight": 0.0, "normalize": False},
    "masked": {"level": "token", "max_weight": 2.0, "min_weight": 0.0, "normalize": False},
    "rejection": {"rejection_level": "sequence_mean", "kl_kind": "k1", "high": REQUIRED, "low": None},
    OWN: {"options": {}},
}
"""Correction -> its settings with their defaults."""

Columns = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Weights = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
Shaping = Annotated[tuple[ShapingConfig, ...], Field(strict=False)]


class CorrectionConfig(ChoiceConfig):
    """What is done about tokens that the policy would sample with another probability than the rollout did.

    Probabilities are compared as the trainer (`old_logprobs`) and the rollout (`rollout_logprobs`) state them.
    """

    CHOICE: ClassVar[str] = "kind"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = CORRECTIONS

    kind: Annotated[str, AfterValidator(known_name("correction", [name for name in CORRECTIONS if name != OWN]))]
    """`truncated` and `masked` weigh each token's policy loss by an importance ratio, cut off at a bound or 0 beyond
    it; `rejection` leaves tokens or rows out of the loss; `module:function` is your own."""

    level: Literal["token", "sequence", "geometric"] | None = None
    """truncated, masked: the ratio of each token, of its row, or the geometric mean over its row; usually token."""

    max_weight: PositiveFloat | None = None
    """truncated, masked: the largest ratio that is used as it is; usually 2."""

    min_weight: NonNegativeFloat | None = None
    """truncated, masked: the smallest; usually 0."""

    normalize: bool | None = None
    """truncated, masked: divide by the mean weight of the step, so that the step keeps its size; usually not."""

    rejection_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] | None = None
    """rejection: what must be in bounds: each token for itself, or a row's sum, mean or each of its tokens; usually
    sequence_mean."""

    kl_kind: Literal["k1", "k2", "k3", "abs"] | None = None
    """rejection: estimate of KL(rollout || policy) that is bounded; usually k1."""

    high: float | None = None
    """rejection: the largest estimate that stays, in nats."""

    low: float | None = None
    """rejection: the smallest, for k1 only; null is no bound."""

    options: Options | None = None
    """module:function: its keyword arguments."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "CorrectionConfig":
        if self.min_weight is not None and self.max_weight is not None and self.min_weight > self.max_weight:
            raise ValueError(f"min_weight is {self.min_weight:g}, above max_weight, {self.max_weight:g}: swap them")
        if self.low is not None and self.kl_kind != "k1":
            raise ValueError(f"low bounds k1 alone, {self.kl_kind} is never below 0: remove it, or set kl_kind: k1")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high, {self.high:g}: swap them")
        return self


def _read_correction(value: object, _: object) -> CorrectionConfig | Literal["auto"] | None:
    # In place of the union's own reading, which adds the names of its types to the keys that errors name.
    if value == "auto":
        return "auto"
    return None if value is None else CorrectionConfig.model_validate(value)


class AdvantageConfig(ChoiceConfig):
    """Which estimator turns scores into advantages. A setting of another estimator is refused, not ignored."""

    CHOICE: ClassVar[str] = "estimator"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = ESTIMATORS

    GROUPED: ClassVar[frozenset[str]] = frozenset(
        {"grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k", "gdpo", "optimal_token_baseline"}
    )
    """Estimators that compare the samples of one prompt, and so need several."""

    COLUMNS: ClassVar[Mapping[str, str]] = {"remax": "greedy_scores", "optimal_token_baseline": "sum_squared_probs"}
    """Estimators that read a column which no shipped recipe computes."""

    estimator: Annotated[str, AfterValidator(known_name("estimator", [name for name in ESTIMATORS if name != OWN]))]
    """`gae` uses a critic's values; the others need none, and most compare the samples of one prompt
    (docs/algorithms.md). `module:function` is your own."""

    gamma: float | None = Field(default=None, ge=0, le=1)
    """gae, reinforce_plus_plus: discount per token; usually 1."""

    lam: float | None = Field(default=None, ge=0, le=1)
    """gae: 0 trusts the critic's next value, 1, the usual, the whole return."""

    whiten: bool | None = None
    """gae: scale the advantages of a step to mean 0 and variance 1 over its tokens; usually not."""

    kl_coef: NonNegativeFloat | None = None
    """gae, reinforce_plus_plus, rloo, remax, optimal_token_baseline: KL to the reference taken off each token's reward,
    or its sum over the row off the row's score, in reward units per nat; usually 0."""

    kl_kind: KlKind | None = None
    """Those with kl_coef: estimator of that KL; usually k1. `module:function` is your own."""

    kl_control: KlControlConfig | None = None
    """Those with kl_coef: how the coefficient changes from step to step; usually fixed."""

    normalize_std: bool | None = None
    """grpo, gpg: divide by the standard deviation of the group's scores; usual for grpo, false is Dr. GRPO."""

    k: int | None = Field(default=None, ge=2)
    """pass_at_k: the best of how many samples counts; null is the size of the group."""

    reward_columns: Columns | None = None
    """gdpo: row columns that hold a reward each."""

    reward_weights: Weights | None = None
    """gdpo: the weight of each of them after it is normalised; null is 1."""

    options: Options | None = None
    """module:function: its keyword arguments."""

    correction: Annotated[CorrectionConfig | Literal["auto"] | None, WrapValidator(_read_correction)] = "auto"
    """For rollouts that another engine, precision or version sampled; null leaves them as they are. `auto` is truncated
    where `schedule`, `rollout.engine` or `rollout.quantization` makes rollouts such, and null elsewhere and where
    `actor.loss` is decoupled_ppo."""

    shaping: Shaping = ()
    """What is done to the scores before they are compared, one after another; `scores` itself stays the task's."""

    @property
    def applied_correction(self) -> CorrectionConfig | None:
        """The correction that is made; none for an `auto` that no run's config has resolved."""
        return self.correction if isinstance(self.correction, CorrectionConfig) else None

    @model_validator(mode="after")
    def _check_rewards(self) -> "AdvantageConfig":
        if self.reward_weights and len(self.reward_weights) != len(self.reward_columns or ()):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_columns or ())} "
                f"reward_columns: give one for each"
            )
        return self

    @model_validator(mode="after")
    def _check_kl_control(self) -> "AdvantageConfig":
        if self.kl_control is not None and self.kl_control.kind != "fixed" and not self.kl_coef:
            raise ValueError(
                f"kl_coef is 0, so there is no KL penalty for kl_control {self.kl_control.kind} to start from: set it "
                f"above 0, or remove kl_control"
            )
        return self

    @model_validator(mode="after")
    def _check_shaping(self) -> "AdvantageConfig":
        if not self.shaping:
            return self
        if self.estimator == "remax":
            raise ValueError(
                "shaping changes the scores and not the greedy_scores that remax takes off them, so that they say "
                "nothing about each other: remove shaping, or shape both in the reward function"
            )
        if self.reward_columns not in (None, ("scores",)):
            raise ValueError(
                f"shaping changes the column scores alone, but reward_columns is {', '.join(self.reward_columns)}: "
                f"remove shaping, and give what it does a reward column of its own"
            )
        return self
