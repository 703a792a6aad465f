"""Policy losses: one class per loss, with the settings that it uses. docs/algorithms.md has their formulas."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from flowrl.config.base import ImportName
from flowrl.config.union import Member, OneOf, Options

ClipLow = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class PolicyLossConfig(Member):
    """Base class of the policy losses."""

    kind: str
    """Name of the loss."""


class PpoLoss(PolicyLossConfig):
    """The clipped surrogate of PPO, optionally with dual clipping."""

    kind: Literal["ppo"] = "ppo"
    """Name of the loss."""

    clip_low: ClipLow = 0.2
    """Tokens with a probability ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 0.2
    """Tokens with a ratio above 1 + clip_high and a positive advantage get no gradient."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss of tokens with negative advantage, as a multiple of the advantage; null is none."""


class DecoupledPpoLoss(PolicyLossConfig):
    """PPO with separate proximal and behavior policies, for off-policy rollouts."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Name of the loss."""

    clip_low: ClipLow = 0.2
    """Tokens with a probability ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 0.2
    """Tokens with a ratio above 1 + clip_high and a positive advantage get no gradient."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss of tokens with negative advantage, as a multiple of the advantage; null is none."""

    max_weight: PositiveFloat | None = None
    """Excludes tokens whose proximal to behavior ratio is larger; null keeps all."""


class SapoLoss(PolicyLossConfig):
    """SAPO: a soft sigmoid gate in place of clipping."""

    kind: Literal["sapo"] = "sapo"
    """Name of the loss."""

    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for tokens with positive advantage."""

    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for the other tokens."""


class GspoLoss(PolicyLossConfig):
    """GSPO: clips the mean probability ratio of a sequence. `gspo_token` keeps separate gradients per token."""

    kind: Literal["gspo", "gspo_token"]
    """Name of the loss."""

    clip_low: ClipLow = 3e-4
    """Sequences with a mean ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 4e-4
    """Sequences with a mean ratio above 1 + clip_high and a positive advantage get no gradient."""


class GmpoLoss(PolicyLossConfig):
    """GMPO: the geometric mean of clipped token ratios."""

    kind: Literal["gmpo"] = "gmpo"
    """Name of the loss."""

    clip_low: ClipLow = 0.4
    """Lower bound of a token's log-ratio is -clip_low."""

    clip_high: NonNegativeFloat = 0.4
    """Upper bound of a token's log-ratio."""


class UnclippedLoss(PolicyLossConfig):
    """REINFORCE and GPG: policy gradients without a ratio."""

    kind: Literal["reinforce", "gpg"]
    """Name of the loss."""


class CispoLoss(PolicyLossConfig):
    """CISPO: REINFORCE with a clipped importance weight that gets no gradient."""

    kind: Literal["cispo"] = "cispo"
    """Name of the loss."""

    clip_low: ClipLow = 1.0
    """Smallest weight is 1 - clip_low; 1 is no bound."""

    clip_high: NonNegativeFloat = 4.0
    """Largest weight is 1 + clip_high; the default is that of ScaleRL, arXiv 2510.13786."""


class DppoTvLoss(PolicyLossConfig):
    """DPPO with the total variation distance: masks tokens that moved too far from the old policy."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    """Name of the loss."""

    delta_low: NonNegativeFloat = 0.15
    """Difference of probabilities above which a token with negative advantage gets no gradient to fall further."""

    delta_high: NonNegativeFloat = 0.15
    """Difference of probabilities above which a token with positive advantage gets no gradient to rise further."""

    max_ratio: PositiveFloat | None = None
    """Upper bound of a token's weight; null is none."""


class DppoKlLoss(PolicyLossConfig):
    """DPPO with the binary KL divergence: masks tokens that moved too far from the old policy."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    """Name of the loss."""

    delta_low: NonNegativeFloat = 0.05
    """Divergence in nats above which a token with negative advantage gets no gradient to fall further."""

    delta_high: NonNegativeFloat = 0.05
    """Divergence in nats above which a token with positive advantage gets no gradient to rise further."""

    max_ratio: PositiveFloat | None = None
    """Upper bound of a token's weight; null is none."""


class ClipCovLoss(PolicyLossConfig):
    """Clip-Cov: PPO without gradients for a random fraction of the tokens with high covariance."""

    NOT_ARGUMENTS = frozenset({"cov_fraction", "cov_low", "cov_high"})

    kind: Literal["clip_cov"] = "clip_cov"
    """Name of the loss."""

    clip_low: ClipLow = 0.2
    """Tokens with a probability ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 0.2
    """Tokens with a ratio above 1 + clip_high and a positive advantage get no gradient."""

    cov_fraction: Fraction = 2e-4
    """Fraction of a step's tokens that is selected."""

    cov_low: float = 1.0
    """Smallest covariance of a selected token, in nats times the unit of the advantage."""

    cov_high: float = 5.0
    """Largest covariance of a selected token, in nats times the unit of the advantage."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ClipCovLoss":
        if self.cov_low > self.cov_high:
            raise ValueError(f"cov_low is {self.cov_low:g}, above cov_high, {self.cov_high:g}: swap them")
        return self


class KlCovLoss(PolicyLossConfig):
    """KL-Cov: adds a KL penalty to the fraction of the tokens with the highest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    """Name of the loss."""

    cov_fraction: Fraction = 2e-4
    """Fraction of a step's tokens that is selected."""

    cov_kl_coef: NonNegativeFloat = 1.0
    """Weight of the KL to the old policy on selected tokens, in units of the advantage per nat."""

    cov_kl_kind: Literal["abs", "k2", "k3"] = "abs"
    """KL estimator."""

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments for the loss."""
        return {"kl_coef": self.cov_kl_coef, "kl_kind": self.cov_kl_kind}


class CustomLoss(PolicyLossConfig):
    """A user function that returns a loss per token and metrics."""

    kind: ImportName
    """The function, as `module:function`."""

    options: Options = Field(default_factory=dict)
    """Keyword arguments of the function."""


AnyPolicyLoss = Annotated[
    PpoLoss
    | DecoupledPpoLoss
    | SapoLoss
    | GspoLoss
    | GmpoLoss
    | UnclippedLoss
    | CispoLoss
    | DppoTvLoss
    | DppoKlLoss
    | ClipCovLoss
    | KlCovLoss
    | CustomLoss,
    OneOf(default="ppo", allows_bare_name=True),
]
