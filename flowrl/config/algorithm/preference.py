"""Preference losses, and combinations of a policy loss with a language-modeling loss on pretraining text (PTX).

No included recipe uses these settings. A recipe loads a function from `flowrl/algorithms/registry.py` and passes it
`arguments()`.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from flowrl.config.base import ImportName, Member, OneOf, Options

Beta = Annotated[PositiveFloat, Field(description="Strength of the KL regularization to the reference.")]


class PreferenceConfig(Member):
    """Base class of preference losses. Usage: `preference_losses.load(config.loss)(**columns,
    **config.arguments())`.
    """

    NOUN = "a preference loss"
    KEY = "loss"

    loss: str
    """Name of the loss."""


class RewardModelLoss(PreferenceConfig):
    """Pairwise loss of reward models. `log_sig` and `log_exp` are two forms of the same function."""

    loss: Literal["log_sig", "log_exp"]
    margin: NonNegativeFloat = 0.0
    """Difference by which the chosen score should exceed the rejected score."""


class DpoLoss(PreferenceConfig):
    """Direct preference optimization."""

    loss: Literal["dpo"] = "dpo"
    beta: Beta = 0.1

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a label is flipped."""


class DpoVariantLoss(PreferenceConfig):
    """DPO with a hinge loss, or IPO."""

    loss: Literal["dpo_hinge", "ipo"]
    beta: Beta = 0.1


class SimpoLoss(PreferenceConfig):
    """SimPO: length-normalized rewards without a reference model."""

    loss: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """Scale of the reward."""

    margin: NonNegativeFloat = 1.0
    """Difference by which the chosen reward should exceed the rejected reward."""


class OrpoLoss(PreferenceConfig):
    """ORPO: supervised fine-tuning plus an odds-ratio term."""

    loss: Literal["orpo"] = "orpo"
    coef: NonNegativeFloat = 0.1
    """Weight of the odds-ratio term."""


class KtoLoss(PreferenceConfig):
    """KTO: single responses labeled as desirable or undesirable."""

    loss: Literal["kto"] = "kto"
    beta: Beta = 0.1

    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable responses."""

    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable responses."""


class CustomPreferenceLoss(PreferenceConfig):
    """User function that returns a loss per pair, and metrics."""

    loss: ImportName
    options: Options = Field(default_factory=dict)


AnyPreference = Annotated[
    RewardModelLoss | DpoLoss | DpoVariantLoss | SimpoLoss | OrpoLoss | KtoLoss | CustomPreferenceLoss, OneOf()
]


class PtxConfig(Member):
    """Base class of PTX forms. Usage: `ptx_forms.load(config.form)(policy_loss, lm_loss, **config.arguments())`."""

    NOUN = "a PTX form"
    KEY = "form"

    form: str
    """Name of the form."""


class AddPtx(PtxConfig):
    """Computes policy_loss + coef * lm_loss."""

    form: Literal["add"] = "add"
    coef: NonNegativeFloat
    """Weight of the language-modeling loss."""


class MixPtx(PtxConfig):
    """Computes (1 - coef) * policy_loss + coef * lm_loss."""

    form: Literal["mix"] = "mix"
    coef: float = Field(ge=0, le=1)
    """Weight of the language-modeling loss, in [0, 1]."""


class CustomPtx(PtxConfig):
    """User function of the policy loss and the language-modeling loss."""

    form: ImportName
    options: Options = Field(default_factory=dict)


AnyPtx = Annotated[AddPtx | MixPtx | CustomPtx, OneOf()]
