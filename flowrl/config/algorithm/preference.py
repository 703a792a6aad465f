"""Settings of preference losses, reward model losses and PTX (language modeling on text in policy updates)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Config, ImportName, Member, OneOf, Options
from flowrl.config.data.data_settings import DataFile, Files, as_data_files, generated_of, paths_of

Beta = Annotated[PositiveFloat, Field(description="Strength of the KL regularization to the reference.")]
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5, description="Probability that a label is flipped.")]


class PreferenceConfig(Member):
    """Base class of preference losses. Usage: `preference_losses.load(loss.kind)(**columns, **loss.arguments())`."""

    NOUN = "a preference loss"

    IS_PAIRED: ClassVar[bool] = True
    """Whether the loss reads pairs. False: it reads single labeled responses."""

    NEEDS_REFERENCE: ClassVar[bool | None] = False
    """Whether the loss reads the log-probabilities of a reference. None: depends on the user function."""

    IS_MEAN_PER_TOKEN: ClassVar[bool] = False
    """Whether the loss reads the mean of a response's token log-probabilities instead of their sum."""

    kind: str
    """Name of the loss."""


class DpoLoss(PreferenceConfig):
    """Direct preference optimization."""

    NEEDS_REFERENCE = True

    kind: Literal["dpo"] = "dpo"
    beta: Beta = 0.1

    label_smoothing: LabelSmoothing = 0.0


class DpoVariantLoss(PreferenceConfig):
    """DPO with a hinge loss, or IPO."""

    NEEDS_REFERENCE = True

    kind: Literal["dpo_hinge", "ipo"]
    beta: Beta = 0.1


class SimpoLoss(PreferenceConfig):
    """SimPO: length-normalized rewards without a reference model."""

    IS_MEAN_PER_TOKEN = True

    kind: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """Scale of the reward."""

    margin: NonNegativeFloat = 1.0
    """Difference by which the chosen reward should exceed the rejected reward."""


class OrpoLoss(PreferenceConfig):
    """ORPO: supervised fine-tuning plus an odds-ratio term."""

    IS_MEAN_PER_TOKEN = True

    kind: Literal["orpo"] = "orpo"
    coef: NonNegativeFloat = 0.1
    """Weight of the odds-ratio term."""


class CpoLoss(PreferenceConfig):
    """CPO: DPO without a reference, plus supervised fine-tuning."""

    kind: Literal["cpo"] = "cpo"
    beta: PositiveFloat = 0.1
    """Scale of the reward."""

    sft_coef: NonNegativeFloat = 1.0
    """Weight of the cross-entropy of the chosen response, a mean over its tokens."""

    label_smoothing: LabelSmoothing = 0.0


class KtoLoss(PreferenceConfig):
    """KTO: single responses labeled as desirable or undesirable."""

    IS_PAIRED = False
    NEEDS_REFERENCE = True

    kind: Literal["kto"] = "kto"
    beta: Beta = 0.1

    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable responses."""

    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable responses."""


class CustomPreferenceLoss(PreferenceConfig):
    """User function that returns a loss per pair, and metrics."""

    NEEDS_REFERENCE = None

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyPreference = Annotated[
    DpoLoss | DpoVariantLoss | SimpoLoss | OrpoLoss | CpoLoss | KtoLoss | CustomPreferenceLoss,
    OneOf(default="dpo", allows_bare_name=True),
]


class RewardModelLossConfig(Member):
    """Base class of the losses of reward models."""

    NOUN = "a reward model loss"

    kind: str
    """Name of the loss."""


class PairwiseRewardLoss(RewardModelLossConfig):
    """Pairwise loss of reward models. `log_sig` and `log_exp` are two forms of the same function."""

    kind: Literal["log_sig", "log_exp"] = "log_sig"
    margin: NonNegativeFloat = 0.0
    """Difference by which the chosen score should exceed the rejected score. The column `margin` of the data replaces
    it.
    """


class CustomRewardModelLoss(RewardModelLossConfig):
    """User function of the scores that returns a loss per pair, and metrics."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyRewardModelLoss = Annotated[
    PairwiseRewardLoss | CustomRewardModelLoss, OneOf(default="log_sig", allows_bare_name=True)
]


class PtxConfig(Config):
    """Language modeling on text in every policy update (PPO-ptx), which preserves the policy's ability to model
    this text. Each optimizer step combines the policy loss with the cross-entropy of a batch of text.
    """

    data: Files
    """Conversations as for SFT, or plain text, for example with the keys `source` and `Target`. A path, or a list of
    files with their settings, as in `data.train`. The template and the policies for invalid rows are those of `data`.
    """

    form: Literal["add", "mix"] = "add"
    """`add`: policy loss + coef * cross-entropy. `mix`: (1 - coef) * policy loss + coef * cross-entropy."""

    coef: NonNegativeFloat
    """Weight of the cross-entropy; with `mix` at most 1."""

    batch_size: PositiveInt
    """Sequences of text per optimizer step, over all ranks."""

    max_tokens: PositiveInt
    """Maximum number of tokens of a sequence. `data.too_long` selects the treatment of longer sequences."""

    @model_validator(mode="after")
    def _check(self) -> "PtxConfig":
        if self.form == "mix" and self.coef > 1:
            raise ValueError(f"coef is {self.coef:g}, but form mix needs at most 1: lower it, or set form: add")
        return self

    @property
    def training_files(self) -> tuple[DataFile, ...]:
        """Files of the text."""
        return as_data_files(self.data)

    def files(self, group: str) -> dict[str, Path]:
        """Returns the path of each file by the key of its setting. `group` is the key of this settings group."""
        return paths_of(f"{group}.data", self.data)

    def generated(self, group: str) -> tuple[str, ...]:
        """Returns the keys of all settings `reasoning_gym`. `group` is the key of this settings group."""
        return generated_of(f"{group}.data", self.data)
