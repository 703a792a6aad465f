"""Settings of distillation."""

from pydantic import model_validator

from flowrl.config import ReferenceConfig, RolloutRunConfig, StudentConfig


class DistillationConfig(RolloutRunConfig):
    """Settings of recipes/distillation/train.py. The role `actor` is the student."""

    actor: StudentConfig
    """The student, which generates the responses and is trained to agree with the teacher."""

    teacher: ReferenceConfig
    """The teacher. Its tokenizer must have the same tokens as that of the student."""

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metric that ranks checkpoints."""
        return ("agreement",) if self.evaluate_every else ("actor/loss",)

    @model_validator(mode="after")
    def _check_sampling(self) -> "DistillationConfig":
        rollout, loss = self.rollout, self.actor.loss
        if loss.READS_SAMPLES and (rollout.top_k or rollout.top_p < 1):
            raise ValueError(
                f"rollout.top_k is {rollout.top_k}, top_p is {rollout.top_p:g}, but actor.loss {loss.kind} needs "
                "samples of the student's whole distribution: set top_k: 0, top_p: 1.0"
            )
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> "DistillationConfig":
        student, sampled, loss = self.actor.temperature, self.rollout.temperature, self.actor.loss
        if loss.READS_SAMPLES and student != sampled:
            raise ValueError(
                f"actor.temperature is {student:g}, but rollout.temperature is {sampled:g}, and actor.loss {loss.kind} "
                f"needs samples of the student: remove actor.temperature, or set it to {sampled:g}"
            )
        return self
