"""Settings of preference optimization."""

from typing import Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from flowrl.config import EpochConfig, PreferenceActorConfig, ReferenceConfig


class DPOConfig(EpochConfig):
    """Settings of preference optimization (recipes/dpo/train.py). The training file has preference pairs, or
    labeled responses for `actor.loss: kto`.
    """

    batch_size: PositiveInt
    """Pairs per step, over all ranks. With `actor.loss: kto`, labeled responses per step."""

    actor: PreferenceActorConfig
    """The policy that is trained, and its loss."""

    reference: ReferenceConfig | None = Field(default=None, validate_default=True)
    """The model with which the loss compares the policy. Null uses the actor's initial model. If the loss has no
    reference, the model is not loaded.
    """

    reference_logprobs: Literal["auto", "stored", "live"] = "auto"
    """Time at which the reference's log-probabilities are computed. `stored`: once for all pairs, before the first
    step. `live`: in every step. `auto` selects `stored` if the run has more than one pass over the pairs. KTO requires
    `live`.
    """

    @field_validator("reference", mode="after")
    @classmethod
    def _resolve_reference(cls, reference: ReferenceConfig | None, info: ValidationInfo) -> ReferenceConfig | None:
        """Replaces null by the actor's model if the loss needs a reference, and an unused reference by null."""
        actor = info.data.get("actor")
        if actor is None:
            return reference  # A missing group has an error of its own.
        needs = actor.loss.needs_reference
        if needs and reference is None:
            return ReferenceConfig(model=actor.model, engine=actor.engine)
        return None if needs is False else reference

    @model_validator(mode="after")
    def _check_stored(self) -> "DPOConfig":
        if self.reference_logprobs == "stored" and not self.actor.loss.is_paired:
            raise ValueError(
                f"reference_logprobs is stored, but actor.loss {self.actor.loss.kind} combines each prompt with a "
                "different response in every epoch: set auto or live"
            )
        return self

    @property
    def precomputed_roles(self) -> tuple[str, ...]:
        """(`reference`,) if the reference's log-probabilities are stored for any number of pairs. Otherwise, empty."""
        has_passes = self.epochs is not None and self.epochs > 1
        is_stored = self.reference_logprobs == "stored" or (self.reference_logprobs == "auto" and has_passes)
        return ("reference",) if is_stored and self.actor.loss.is_paired else ()

    def stores_reference(self, num_pairs: int) -> bool:
        """Returns whether the reference's log-probabilities are computed once before the first step."""
        if self.reference is None or self.reference_logprobs == "live" or not self.actor.loss.is_paired:
            return False
        return self.reference_logprobs == "stored" or self.steps * self.batch_size > num_pairs

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metric that ranks checkpoints."""
        return ("accuracy",) if self.evaluate_every else ("actor/loss",)
