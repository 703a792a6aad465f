"""From scores to advantages."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from flowrl.config.base import Config, KlKind


class AdvantageConfig(Config):
    """Which estimator turns scores into advantages. A setting of the other estimator is refused, not ignored."""

    ONLY_FOR: ClassVar[dict[str, tuple[str, ...]]] = {
        "gae": ("gamma", "lam", "whiten", "kl_coef", "kl_kind"),
        "grpo": ("normalize_std",),
    }

    estimator: Literal["gae", "grpo"]
    """`gae` uses a critic's values; `grpo` compares the samples of one prompt."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """gae: discount per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """gae: 0 trusts the critic's next value, 1 the whole return."""

    whiten: bool = False
    """gae: scale the advantages of a step to mean 0 and variance 1 over its tokens."""

    kl_coef: NonNegativeFloat = 0.0
    """gae: KL to the reference taken off each token's reward, in reward units per nat."""

    kl_kind: KlKind = "k1"
    """gae: estimator of that KL."""

    normalize_std: bool = True
    """grpo: divide by the standard deviation of the group's scores."""

    @model_validator(mode="after")
    def _check(self) -> "AdvantageConfig":
        for estimator, names in self.ONLY_FOR.items():
            for name in names:
                value = getattr(self, name)  # the loop is over our own field names
                if estimator != self.estimator and value != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} belongs to estimator {estimator} and does nothing for {self.estimator}: remove it"
                    )
        return self
