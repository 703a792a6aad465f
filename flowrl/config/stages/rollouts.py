"""Settings of runs that train on generated responses."""

from typing import TYPE_CHECKING

from pydantic import PositiveInt, model_validator

from flowrl.config.base import ConfigError
from flowrl.config.roles import (
    RewardConfig,
    RolloutConfig,
    TrainedConfig,
    quantized_device_problem,
    quantized_dtype_problem,
)
from flowrl.config.rollout.engines import name_alternatives
from flowrl.config.run import DatasetConfig, EvaluationConfig, SettingValues
from flowrl.config.schedule import AnySchedule, AsyncSchedule, SyncSchedule


class RolloutRunConfig(DatasetConfig):
    """Settings of recipes that generate responses to prompts and then take a few optimizer steps per training step.

    A subclass adds the policy as a field `actor`, the other roles, and the algorithm.
    """

    if TYPE_CHECKING:
        # Subclasses declare the field, because its default values derive from fields of the subclass before it.
        @property
        def actor(self) -> TrainedConfig: ...

    samples_per_prompt: PositiveInt = 1
    """Responses per prompt. A step uses batch_size / samples_per_prompt prompts."""

    minibatch_size: PositiveInt
    """Sequences per optimizer step, over all ranks. If it does not divide batch_size, the last minibatch of an epoch is
    smaller.
    """

    rollout: RolloutConfig
    """Generation settings."""

    schedule: AnySchedule = SyncSchedule()
    """Overlap of generation and training."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the held-out prompts in `data`."""

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metrics that rank checkpoints for `checkpoint.keep_best`. They include the accuracy only if it is evaluated
        periodically.
        """
        return ("accuracy",) if self.evaluate_every else super().compared_by

    @property
    def reward_settings(self) -> RewardConfig | None:
        """Settings of the role that scores responses. None if no such role exists."""
        return next((role for role in self.role_settings.values() if isinstance(role, RewardConfig)), None)

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts per step."""
        return self.batch_size // self.samples_per_prompt

    @property
    def trained_per_step(self) -> int:
        """Number of sequences of a step that are trained."""
        return self.batch_size

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns steps times minibatches."""
        return settings["steps"] * -(-settings["batch_size"] // settings["minibatch_size"])

    @model_validator(mode="after")
    def _check_sizes(self) -> "RolloutRunConfig":
        size, samples = self.batch_size, self.samples_per_prompt
        if size % samples:
            near = [str(count * samples) for count in (size // samples, size // samples + 1) if count]
            raise ValueError(
                f"batch_size is {size}, not a multiple of samples_per_prompt, {samples}: set it to {' or '.join(near)}"
            )
        if self.minibatch_size > size:
            raise ValueError(f"minibatch_size is {self.minibatch_size}, more than batch_size: set at most {size}")
        schedule, prompts = self.schedule, self.prompts_per_step
        if isinstance(schedule, AsyncSchedule) and schedule.overprovision > prompts:
            raise ValueError(
                f"schedule.overprovision is {schedule.overprovision}, more than prompts per step: set at most {prompts}"
            )
        return self

    def check_served_dtype(self) -> None:
        """Raises ConfigError if the weights do not have the dtype that the quantized matrix products require."""
        dtype = self.rollout.sent_dtype or self.actor.model.dtype
        if problem := quantized_dtype_problem("rollout", self.rollout, dtype):
            raise ConfigError(problem)

    @model_validator(mode="after")
    def _check_engine(self) -> "RolloutRunConfig":
        rollout, dtype = self.rollout, self.rollout.sent_dtype or self.actor.model.dtype
        capabilities = rollout.capabilities
        if dtype not in capabilities.dtypes:
            first, setting = capabilities.dtypes[0], rollout.name_setting("dtype")
            fix = f"actor.model.dtype: {first}" if setting is None else f"rollout.{setting}: {first}"
            raise ValueError(
                f"rollout.engine is {rollout.engine}, which has no {dtype}, but actor.model.dtype is "
                f"{self.actor.model.dtype}: set {fix}"
            )
        if self.schedule.is_streaming and not capabilities.streaming:
            others = name_alternatives(lambda known: known.streaming)
            raise ValueError(
                f"schedule.kind is async, but rollout.engine {rollout.engine} does not stream: set schedule.kind: "
                f"one_step_off, or rollout.engine: {others}"
            )
        return self

    @model_validator(mode="after")
    def _resolve_template(self) -> "RolloutRunConfig":
        """Replaces a null `rollout.template` by `data.template`, so that config.yaml records it."""
        if self.rollout.template is None and self.data.template is not None:
            # The model is frozen, and a validator after all fields may not return another instance.
            object.__setattr__(self, "rollout", self.rollout.model_copy(update={"template": self.data.template}))
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> "RolloutRunConfig":
        device = self.placement.device
        devices = ("cpu", "cuda") if device == "auto" else (device,)
        problems = [quantized_device_problem("rollout", self.rollout, kind) for kind in devices]
        if all(problems):
            raise ValueError(problems[0])
        # Whether device auto supports the quantization is known only when the run is planned.
        if not any(problems):
            self.check_served_dtype()
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> "RolloutRunConfig":
        longest = self.rollout.max_model_len
        needed = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if longest is not None and longest < needed:
            raise ValueError(
                f"rollout.{self.rollout.name_setting('max_model_len')} is {longest}, less than data.max_prompt_tokens "
                f"+ rollout.max_response_tokens, {needed}: set {needed} or more"
            )
        return self
