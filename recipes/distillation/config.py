"""Settings of distillation."""

from collections.abc import Mapping

from pydantic import model_validator

from flowrl.config import ReferenceConfig, RewardConfig, RolloutRunConfig, StudentConfig


class DistillationConfig(RolloutRunConfig):
    """Settings of recipes/distillation/train.py. The role `actor` is the student."""

    actor: StudentConfig
    """The student, which generates the responses and is trained to agree with the teacher."""

    teacher: ReferenceConfig
    """The teacher. Its tokenizer must have the same tokens as the tokenizer of the student."""

    reward: RewardConfig | None = None
    """The reward that measures the student's responses. The student is not trained on it. Null measures only the
    student's agreement with the teacher.
    """

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metric that ranks checkpoints."""
        return ("agreement",) if self.evaluate_every else ("actor/loss",)

    @property
    def trains_on_scores(self) -> bool:
        return False

    @classmethod
    def unsupported_settings(cls) -> Mapping[str, str]:
        reason = "the student is trained on all responses, whatever their scores: remove it"
        return {**super().unsupported_settings(), "dynamic_sampling": reason}

    @model_validator(mode="after")
    def _check_failures(self) -> "DistillationConfig":
        if self.on_failure == "drop":
            raise ValueError(
                "reward.on_failure is drop, but the student is trained on all responses: set zero, or stop"
            )
        return self

    @model_validator(mode="after")
    def _check_outputs(self) -> "DistillationConfig":
        candidates = ("topk_ids", "topk_logprobs") if self.actor.loss.num_candidates else ()
        is_evaluated = any(self.evaluation_interval(name) != 0 for name in self.data.evaluation_sets)
        compared = ("topk_ids",) if is_evaluated else ()  # `agreement` compares the most likely tokens
        self.actor.engine.check_role((*candidates[1:], *compared), name="actor")
        self.teacher.engine.check_role((*candidates, *compared), name="teacher")
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> "DistillationConfig":
        rollout, loss = self.rollout, self.actor.loss
        if loss.reads_samples and (rollout.top_k or rollout.top_p < 1):
            raise ValueError(
                f"rollout.top_k is {rollout.top_k}, top_p is {rollout.top_p:g}, but actor.loss {loss.kind} needs "
                "samples of the student's whole distribution: set top_k: 0, top_p: 1.0"
            )
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> "DistillationConfig":
        student, sampled, loss = self.actor.temperature, self.rollout.temperature, self.actor.loss
        if loss.reads_samples and student != sampled:
            raise ValueError(
                f"actor.temperature is {student:g}, but rollout.temperature is {sampled:g}, and actor.loss {loss.kind} "
                f"needs samples of the student: remove actor.temperature, or set it to {sampled:g}"
            )
        return self
