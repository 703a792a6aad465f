"""Losses of recipes that learn from something else than their own rollouts: preferences, and pretraining text."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from flowrl.config.algorithm.choice import OWN, REQUIRED, ChoiceConfig, Options, known_name

PREFERENCE_LOSSES: dict[str, dict[str, Any]] = {
    "log_sig": {"margin": 0.0},
    "log_exp": {"margin": 0.0},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "dpo_hinge": {"beta": 0.1},
    "ipo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "margin": 1.0},
    "orpo": {"coef": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    OWN: {"options": {}},
}
"""Preference loss -> its settings with their defaults. The names are those of flowrl/algorithms/registry.py."""

PTX_FORMS: dict[str, dict[str, Any]] = {"add": {"coef": REQUIRED}, "mix": {"coef": REQUIRED}, OWN: {"options": {}}}
"""Form of mixing -> its settings with their defaults."""


class PreferenceConfig(ChoiceConfig):
    """A loss on preferences. A setting of another loss is refused, not ignored.

    `preference_losses.load(config.loss)(**columns, **config.arguments())` is the loss (flowrl/algorithms/registry.py).
    """

    CHOICE: ClassVar[str] = "loss"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = PREFERENCE_LOSSES

    loss: Annotated[
        str, AfterValidator(known_name("preference loss", [name for name in PREFERENCE_LOSSES if name != OWN]))
    ]
    """`log_sig` and `log_exp` train reward models; `dpo`, `dpo_hinge`, `ipo`, `simpo`, `orpo` policies on pairs; `kto`
    on single answers; `module:function` is your own."""

    beta: PositiveFloat | None = None
    """dpo, dpo_hinge, ipo, kto: how strongly the policy is held to the reference, usually 0.1; simpo: scale of the
    reward, usually 2."""

    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """dpo: probability that a label is the wrong way round; usually 0."""

    margin: NonNegativeFloat | None = None
    """log_sig, log_exp, simpo: by how much the better answer is to be ahead, in units of the reward; usually 0, for
    simpo 1."""

    coef: NonNegativeFloat | None = None
    """orpo: weight of the preference beside the fine-tuning; usually 0.1."""

    desirable_weight: PositiveFloat | None = None
    """kto: weight of desirable answers; usually 1."""

    undesirable_weight: PositiveFloat | None = None
    """kto: weight of the others; usually 1."""

    options: Options | None = None
    """module:function: its keyword arguments."""


class PtxConfig(ChoiceConfig):
    """How the loss on pretraining text is mixed into that of the policy.

    `ptx_forms.load(config.form)(policy_loss, lm_loss, **config.arguments())` is the loss of both.
    """

    CHOICE: ClassVar[str] = "form"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = PTX_FORMS

    form: Annotated[str, AfterValidator(known_name("ptx form", [name for name in PTX_FORMS if name != OWN]))]
    """`add`: policy + coef text; `mix`: (1 - coef) policy + coef text; `module:function` is your own."""

    coef: NonNegativeFloat | None = None
    """add, mix: weight of the text; for mix at most 1."""

    options: Options | None = None
    """module:function: its keyword arguments."""

    @model_validator(mode="after")
    def _check_coef(self) -> "PtxConfig":
        if self.form == "mix" and self.coef is not None and self.coef > 1:
            raise ValueError(
                f"coef is {self.coef:g}, but form mix needs one in [0, 1]: use form add for a larger weight"
            )
        return self
