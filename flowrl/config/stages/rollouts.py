"""Settings of runs that train on generated responses."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from flowrl.config.base import Config, ConfigError, Dependency, DeviceKind
from flowrl.config.data.evaluation_settings import EvaluationConfig
from flowrl.config.engines.rollout_engines import name_alternatives
from flowrl.config.model import default_compute_dtype
from flowrl.config.rewards.environment_settings import EnvironmentConfig
from flowrl.config.rewards.reward_settings import RewardConfig
from flowrl.config.roles import (
    RolloutConfig,
    TrainedConfig,
    quantized_device_problem,
    quantized_dtype_problem,
)
from flowrl.config.run import DatasetConfig, SettingValues
from flowrl.config.schedule import AnySchedule, AsyncSchedule, SyncSchedule


class DynamicSampling(Config):
    """Dynamic sampling (DAPO): groups whose scores are all equal are dropped, and other prompts are generated instead.

    A step whose batch is not full after `max_rounds` trains on the groups that it has.
    """

    max_rounds: PositiveInt = 10
    """Largest number of generation rounds of a step. With schedule async, a step trains on its complete groups as soon
    as the dropped and the complete groups together reach max_rounds times its prompts.
    """

    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Prompts of a round, as a multiple of the missing groups. Above 1, a step has fewer rounds, and surplus groups are
    dropped. With schedule async, there are no rounds, and this setting has no effect.
    """

    column: str = "scores"
    """Column whose values must differ: `scores`, or the name of a reward. For prompts whose data source
    is not in the reward's `data_sources`, `scores` is used instead.
    """


class RolloutRunConfig(DatasetConfig):
    """Settings of recipes that generate responses to prompts and then take a few optimizer steps per training step.

    A subclass adds the policy as a field `actor`, the other roles, and the algorithm.
    """

    if TYPE_CHECKING:
        # Subclasses declare the field, because its default values derive from earlier fields of the subclass.
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

    environment: EnvironmentConfig | None = None
    """Environment that responds to the policy and computes the rewards, in place of `reward`. Null: no environment, so
    every row has one response.
    """

    dynamic_sampling: DynamicSampling | None = None
    """Drops groups whose scores are all equal, and generates other groups. Null trains on all groups."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the held-out prompts in `data`."""

    DEPENDENCIES = (
        Dependency(
            ("evaluation",),
            lambda config: config.data.evaluation_files,
            "data has no evaluation data: set data.test, or remove it",
            is_error=False,
        ),
        Dependency(
            tuple(
                f"reward.{name}"
                for name in ("workers", "timeout_s", "retries", "memory_mb", "network", "max_concurrent")
            ),
            lambda config: config.calls_functions,
            "no function runs in a process of flowrl: remove it",
        ),
    )

    @classmethod
    def unsupported_settings(cls) -> Mapping[str, str]:
        if "environment" in cls.ALTERNATIVES:
            return {}
        return {"environment": "this recipe does not use environments: remove it"}

    @property
    def calls_functions(self) -> bool:
        """Whether the processes of the reward call functions: rewards, or `evaluation.extract_answer`."""
        reward = self.reward_settings
        evaluations = (self.evaluation, *self.evaluation_by_set.values())
        has_answers = any(evaluation.extract_answer is not None for evaluation in evaluations)
        return has_answers or (reward is not None and any(reward.functions()))

    @property
    def evaluates_responses(self) -> bool:
        return True

    @property
    def evaluation_by_set(self) -> dict[str, EvaluationConfig]:
        """Name of a held-out set -> evaluation settings: those of the set, or else `evaluation`."""
        sets = self.data.evaluation_sets.items()
        return {name: held_out.evaluation or self.evaluation for name, held_out in sets}

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metrics that rank checkpoints for `checkpoint.keep_best`. They include the accuracy only if it is evaluated
        periodically.
        """
        return ("accuracy",) if self.evaluate_every else super().compared_by

    @property
    def can_end_early(self) -> bool:
        """Whether a step may have fewer updates, because rows or groups are dropped."""
        return self.dynamic_sampling is not None or self.on_failure == "drop"

    @model_validator(mode="after")
    def _check_environment(self) -> "RolloutRunConfig":
        if self.environment is None:
            return self
        if self.reward_settings is not None:
            raise ValueError("reward and environment are both set, but the environment gives the rewards: remove one")
        return self

    @property
    def on_failure(self) -> Literal["stop", "zero", "drop"]:
        """Treatment of a response whose reward or environment failed."""
        scoring = self.environment or self.reward_settings
        return "stop" if scoring is None else scoring.on_failure

    @property
    def max_failure_rate(self) -> float:
        """Largest share of failed responses in a step."""
        scoring = self.environment or self.reward_settings
        return 0.0 if scoring is None else scoring.max_failure_rate

    @property
    def score_columns(self) -> tuple[str, ...]:
        """Columns of a scored batch with one number per row."""
        if self.environment is not None:
            return ("scores",)
        return () if self.reward_settings is None else self.reward_settings.columns

    @model_validator(mode="after")
    def _check_dynamic_sampling(self) -> "RolloutRunConfig":
        sampling = self.dynamic_sampling
        if sampling is None:
            return self
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but dynamic_sampling compares the scores of several "
                "responses: set it to at least 2"
            )
        if not self.score_columns:
            raise ValueError("dynamic_sampling is set, but this run has no reward: remove dynamic_sampling")
        if sampling.column not in self.score_columns:
            raise ValueError(
                f"dynamic_sampling.column is {sampling.column}, which no reward computes: set it to "
                f"{' or '.join(self.score_columns)}"
            )
        return self

    @property
    def reward_settings(self) -> RewardConfig | None:
        """Settings of the role that scores responses. None if no such role exists."""
        return next((value for _, value in self if isinstance(value, RewardConfig)), None)

    @property
    def trains_on_scores(self) -> bool:
        """Whether scores, if there are any, decide how the policy is trained. If not, they only measure the policy."""
        return True

    @property
    def measures_success(self) -> bool:
        return self.trains_on_scores and (self.reward_settings is not None or self.environment is not None)

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

    def served_dtype(self, device: DeviceKind) -> str:
        """Returns the dtype that the rollout's weights have if the run uses CPUs or GPUs (`device`)."""
        model, rollout = self.actor.model, self.rollout
        if rollout.sent_dtype is not None:
            return rollout.sent_dtype
        if device == "cpu" or rollout.engine != "vllm":
            return model.dtype
        engine = self.actor.engine
        default = default_compute_dtype(model, device) if "compute_dtype" in engine.capabilities.settings else None
        return engine.compute_dtype or default or model.dtype

    def check_served_dtype(self, device: DeviceKind) -> None:
        """Raises ConfigError if the weights do not have the dtype that the quantized matrix products require."""
        if problem := quantized_dtype_problem("rollout", self.rollout, self.served_dtype(device)):
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
            self.check_served_dtype(devices[-1])
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
