"""Policy losses: one class per loss, with the settings that it uses. docs/algorithms.md has their formulas."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from flowrl.config.base import ImportName, Member, OneOf, Options

ClipLow = Annotated[float, Field(ge=0, le=1)]
CovFraction = Annotated[float, Field(ge=0, le=1, description="Fraction of a step's tokens that is selected.")]
DualClip = Annotated[
    float | None,
    Field(gt=1, description="Upper bound of the loss as a multiple of a negative advantage; null is none."),
]


class PolicyLossConfig(Member):
    """Base class of the policy losses."""

    kind: str
    """Name of the loss."""


class ClippedLoss(PolicyLossConfig):
    """Base class of the losses with the clipping of PPO."""

    clip_low: ClipLow = 0.2
    """Tokens with a probability ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 0.2
    """Tokens with a ratio above 1 + clip_high and a positive advantage get no gradient."""


class PpoLoss(ClippedLoss):
    """The clipped surrogate of PPO, optionally with dual clipping."""

    kind: Literal["ppo"] = "ppo"
    dual_clip: DualClip = None


class DecoupledPpoLoss(ClippedLoss):
    """PPO with separate proximal and behavior policies, for off-policy rollouts."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    dual_clip: DualClip = None

    max_weight: PositiveFloat | None = None
    """Excludes tokens whose proximal to behavior ratio is larger; null keeps all."""


class SapoLoss(PolicyLossConfig):
    """SAPO: a soft sigmoid gate in place of clipping."""

    kind: Literal["sapo"] = "sapo"
    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for tokens with positive advantage."""

    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for the other tokens."""


class GspoLoss(PolicyLossConfig):
    """GSPO: clips the mean probability ratio of a sequence. `gspo_token` keeps separate gradients per token."""

    kind: Literal["gspo", "gspo_token"]
    clip_low: ClipLow = 3e-4
    """Sequences with a mean ratio below 1 - clip_low and a negative advantage get no gradient."""

    clip_high: NonNegativeFloat = 4e-4
    """Sequences with a mean ratio above 1 + clip_high and a positive advantage get no gradient."""


class GmpoLoss(PolicyLossConfig):
    """GMPO: the geometric mean of clipped token ratios."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: ClipLow = 0.4
    """Lower bound of a token's log-ratio is -clip_low."""

    clip_high: NonNegativeFloat = 0.4
    """Upper bound of a token's log-ratio."""


class UnclippedLoss(PolicyLossConfig):
    """REINFORCE and GPG: policy gradients without a ratio."""

    kind: Literal["reinforce", "gpg"]


class CispoLoss(PolicyLossConfig):
    """CISPO: REINFORCE with a clipped importance weight that gets no gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """Smallest weight is 1 - clip_low; 1 is no bound."""

    clip_high: NonNegativeFloat = 4.0
    """Largest weight is 1 + clip_high; the default is that of ScaleRL, arXiv 2510.13786."""


class DppoLoss(PolicyLossConfig):
    """Base class of DPPO, which masks tokens that moved too far from the old policy."""

    delta_low: NonNegativeFloat
    """Distance above which a token with negative advantage gets no gradient to fall further."""

    delta_high: NonNegativeFloat
    """Distance above which a token with positive advantage gets no gradient to rise further."""

    max_ratio: PositiveFloat | None = None
    """Upper bound of a token's weight; null is none."""


class DppoTvLoss(DppoLoss):
    """DPPO with the total variation distance: the difference of probabilities."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    delta_low: NonNegativeFloat = 0.15
    delta_high: NonNegativeFloat = 0.15


class DppoKlLoss(DppoLoss):
    """DPPO with the binary KL divergence in nats."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    delta_low: NonNegativeFloat = 0.05
    delta_high: NonNegativeFloat = 0.05


class ClipCovLoss(ClippedLoss):
    """Clip-Cov: PPO without gradients for a random fraction of the tokens with high covariance."""

    NOT_ARGUMENTS = frozenset({"cov_fraction", "cov_low", "cov_high"})

    kind: Literal["clip_cov"] = "clip_cov"
    cov_fraction: CovFraction = 2e-4

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
    cov_fraction: CovFraction = 2e-4

    cov_kl_coef: NonNegativeFloat = 1.0
    """Weight of the KL to the old policy on selected tokens, in units of the advantage per nat."""

    cov_kl_kind: Literal["abs", "k2", "k3"] = "abs"
    """KL estimator."""

    def arguments(self) -> dict[str, Any]:
        return {"kl_coef": self.cov_kl_coef, "kl_kind": self.cov_kl_kind}


class CustomLoss(PolicyLossConfig):
    """A user function that returns a loss per token and metrics."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


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
