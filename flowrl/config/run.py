"""Settings of every run (`RunConfig`), and of runs that train on their own rollouts (`OnPolicyConfig`)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowrl.config.algorithm.advantage import AnyAdvantage
from flowrl.config.algorithm.correction import WeightCorrection
from flowrl.config.algorithm.shaping import AdaptiveKl, LengthPenalty, OverlongPenalty
from flowrl.config.base import Config, ConfigError, FilePath, ImportName
from flowrl.config.model import OptimizerConfig
from flowrl.config.placement import SINGLE, Placement
from flowrl.config.roles import (
    ActorConfig,
    ReferenceConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    TrainedConfig,
    quantized_device_problem,
    quantized_dtype_problem,
)
from flowrl.config.rollout.engines import name_alternatives
from flowrl.config.schedule import AnySchedule, AsyncSchedule, SyncSchedule
from flowrl.config.setting_tree import config_classes

SettingValues = Mapping[str, Any]  # Any: settings have different types
"""Values of the settings of a config, by name."""


class DataConfig(Config):
    """JSON-lines files of conversations; `docs/batch.md` has the row format."""

    train: FilePath
    """Training file."""

    test: FilePath | None = None
    """Evaluation file. Without it and `tests`, there is no evaluation."""

    tests: Mapping[str, FilePath] = Field(default_factory=dict)
    """Further evaluation files by name. The metrics of a file end with `/NAME`."""

    max_prompt_tokens: PositiveInt
    """Maximum number of tokens of a prompt. A longer prompt raises an error with file and line before the run
    starts.
    """

    evaluation_rows: PositiveInt | None = None
    """Number of rows per evaluation file, from its start; null uses all rows."""

    shuffle: bool = True
    """Shuffle the training rows in every epoch, with the run's seed. False keeps the order of the file."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.evaluation_rows is not None and not self.evaluation_files:
            raise ValueError(f"evaluation_rows is {self.evaluation_rows}, but there is no test file: set test")
        if wrong := [name for name in self.tests if not re.fullmatch(r"[\w.-]+", name)]:
            raise ValueError(f"tests has the name {wrong[0]!r}: use letters, digits, '_', '-' and '.'")
        return self

    @property
    def evaluation_files(self) -> dict[str, Path]:
        """Evaluation files by name. The name of `test` is empty."""
        return ({} if self.test is None else {"": self.test}) | dict(self.tests)

    def files(self, group: str) -> dict[str, Path]:
        """Returns all files by the key of their setting. `group` is the key of this group."""
        test = {} if self.test is None else {f"{group}.test": self.test}
        return (
            {f"{group}.train": self.train} | test | {f"{group}.tests.{key}": file for key, file in self.tests.items()}
        )


class EvaluationConfig(Config):
    """Evaluation on held-out prompts."""

    samples: PositiveInt = 1
    """Responses per prompt. With k > 1, `accuracy` is the mean over all responses (mean@k), and `accuracy_best@k` the
    mean over prompts of the best score.
    """

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"samples is {self.samples}, but temperature is 0, so all responses to a prompt are equal: raise "
                "temperature, or set samples: 1"
            )
        return self


class CheckpointConfig(Config):
    """Checkpoints in the folder `checkpoints/` of the output folder. `resume: auto` continues from the latest
    checkpoint.
    """

    every: NonNegativeInt = 0
    """Number of steps between checkpoints; 0 disables checkpoints. With a value above 0, the last step of the run is
    also saved, even if an interrupt (Ctrl-C) ends the run early. With 0, the run saves only the weights of the policy,
    at its end or after an invalid reward.
    """

    keep_last: PositiveInt | None = 2
    """Number of latest checkpoints to keep; null keeps all."""

    keep_best: NonNegativeInt = 0
    """Number of best checkpoints to keep in addition. They are ranked by evaluation accuracy, or by the validation
    loss of SFT, if evaluate_every is set, otherwise by reward, or by the training loss of SFT.
    """

    asynchronous: bool = True
    """Write checkpoints in the background from a copy in host memory. False blocks the step until the files are
    written.
    """

    @model_validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        if self.keep_best and not self.every:
            raise ValueError(f"keep_best is {self.keep_best}, but every is 0, so nothing is saved: set every")
        return self


class RolloutLogConfig(Config):
    """Generated text in the folder `rollouts/` of the output folder; `docs/generated_text.md` has the format."""

    every: NonNegativeInt = 5
    """Number of steps between saved training rows; step 1 is also saved. 0 saves no training rows. Every evaluation is
    saved.
    """

    rows: PositiveInt = 8
    """Number of training rows per saved step, at equal distances in the batch. A smaller batch is saved completely.
    Evaluations save all rows.
    """

    max_mb: PositiveFloat | None = 1000.0
    """Maximum size of `rollouts/` in megabytes; null keeps everything. The oldest steps are removed first. The first
    and the latest evaluation and the latest training rows are always kept.
    """


class ReportConfig(Config):
    """Optional outputs of a run. `metrics.jsonl`, `trace.json` and `summary.json` are always written."""

    plots: bool = True
    """Draws `curves.png` and `timeline.png` when the run ends."""

    tensorboard: bool = True
    """Writes every metric, and a few rows of generated text, to TensorBoard events in `tensorboard/`."""

    rollouts: RolloutLogConfig | None = RolloutLogConfig()
    """Saves prompts, responses and scores in `rollouts/`; null saves none. Runs without rollouts, such as SFT, have no
    generated text.
    """


class RunConfig(Config):
    """Base class of recipe configs. A recipe adds its roles, its algorithm and its batch sizes (in sequences).

    Each field whose value is a `RoleConfig` defines a role with the name of the field.
    """

    @property
    def role_settings(self) -> dict[str, RoleConfig]:
        """Settings of each role of the run."""
        return {name: value for name, value in self if isinstance(value, RoleConfig)}

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the run. The placement must assign each role to a pool."""
        return tuple(self.role_settings)

    @classmethod
    def possible_roles(cls) -> tuple[str, ...]:
        """Returns the roles that a run of this recipe can have."""
        fields = cls.model_fields.items()
        return tuple(
            name
            for name, field in fields
            if any(issubclass(part, RoleConfig) for part in config_classes(field.annotation))
        )

    def dedicated_roles(self) -> tuple[str, ...]:
        """Returns the roles that require dedicated processes."""
        return tuple(
            name for name, value in self if isinstance(value, RolloutConfig) and value.capabilities.own_process
        )

    recipe: ImportName | None = None
    """Config class of this file, as `module:Class`. The `flowrl` commands require it."""

    output: FilePath
    """Output folder. A folder that contains a different run is rejected."""

    resume: Literal["never", "auto"] = "never"
    """`auto`: resume from the latest checkpoint in output, if there is one. `never`: reject an output folder with a
    run.
    """

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoint settings."""

    report: ReportConfig = ReportConfig()
    """Optional outputs: plots, TensorBoard events and generated text."""

    restarts: NonNegativeInt = 3
    """Maximum number of restarts from the latest checkpoint after failures. Without a checkpoint, a run restarts from
    step 0, but only after a lost process or a missed deadline.
    """

    seed: NonNegativeInt = 0
    """Seed of the data order and of all sampled tokens."""

    backend: Literal["ray", "inline"] = "ray"
    """`ray`: one process per device. `inline`: all roles in the driver process, for debugging."""

    address: str | None = None
    """Ray cluster to join (`auto`, or host:port); null starts a local cluster for the duration of the run."""

    placement: Placement = SINGLE
    """Placement of the roles: a mapping, the name of an included placement such as `split`, or the path of a file."""

    devices: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None
    """Number of devices to use on each node, such as [8, 8]; null uses all devices of the machine."""

    threads: PositiveInt | None = None
    """Number of torch CPU threads per process; null divides the cores evenly among the processes."""

    call_timeout_s: PositiveFloat | None = 1800.0
    """Timeout of one worker call in seconds. After the timeout, its process counts as stuck. Null disables the
    timeout.
    """

    start_timeout_s: PositiveFloat | None = 1800.0
    """Timeout in seconds for the start of a worker: its imports and its constructor, which loads the model. It also
    limits the start of a replacement process. Null disables the timeout.
    """

    steps: PositiveInt
    """Number of training steps."""

    evaluate_every: NonNegativeInt | None = None
    """Number of steps between evaluations. Null evaluates only before the first step and after the last step; 0
    disables evaluation.
    """

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns the number of optimizer updates of each trained role in a run. None if the recipe does not define it.

        A recipe config overrides it, so that `optimizer.total_steps` can be null. `settings` maps names to values.
        """
        return None

    @property
    def num_updates(self) -> int | None:
        """Number of optimizer updates of each trained role in the run, or None if it is unknown."""
        return self.count_updates(dict(self))

    @property
    def can_end_early(self) -> bool:
        """Whether the data may end the run before `steps`. Then `num_updates` is an upper limit."""
        return False

    @field_validator("*", mode="after")
    @classmethod
    def _derive_total_steps(cls, value: Any, info: ValidationInfo) -> Any:  # Any: the value of any setting
        """Replaces a null `optimizer.total_steps`, so that config.yaml records the end of the schedule."""
        optimizer = value.optimizer if isinstance(value, TrainedConfig) else value
        if not isinstance(optimizer, OptimizerConfig) or optimizer.schedule == "constant":
            return value
        try:
            num_updates = cls.count_updates(info.data)
        except KeyError as error:
            needed, names = error.args[0], list(cls.model_fields)
            if needed not in names:
                raise
            if optimizer.total_steps is not None or names.index(needed) < names.index(str(info.field_name)):
                return value  # A missing setting has an error of its own.
            raise ValueError(
                f"optimizer.total_steps cannot be derived, because {cls.__name__} declares {needed}, which "
                f"count_updates needs, after {info.field_name}: set optimizer.total_steps, or declare {needed} before "
                f"{info.field_name}"
            ) from error
        if num_updates is None and optimizer.total_steps is None:
            raise ValueError(
                f"optimizer.schedule {optimizer.schedule} needs an end, but {cls.__name__} does not define the number "
                "of updates: set optimizer.total_steps, or define count_updates in the config class"
            )
        ended = optimizer if num_updates is None else optimizer.with_end(num_updates)
        return ended if value is optimizer else value.model_copy(update={"optimizer": ended})

    @field_validator("*", mode="after")
    @classmethod
    def _derive_temperature(cls, value: Any, info: ValidationInfo) -> Any:  # Any: the value of any setting
        """Replaces a null temperature of a policy by that of the rollout, so that config.yaml records it.

        The config class must declare `rollout` before the policy.
        """
        rollout = info.data.get("rollout")
        if rollout is None or not isinstance(value, ActorConfig | ReferenceConfig) or value.temperature is not None:
            return value
        return value.model_copy(update={"temperature": rollout.temperature})

    @model_validator(mode="after")
    def _check_run(self) -> "RunConfig":
        if self.devices is not None and not any(self.devices):
            raise ValueError(f"devices is {list(self.devices)}, but a run needs at least one device: increase a count")
        every, evaluate = self.checkpoint.every, self.evaluate_every
        if self.checkpoint.keep_best and evaluate and every % evaluate:
            raise ValueError(
                f"checkpoint.every is {every}, but checkpoint.keep_best requires a multiple of evaluate_every, "
                f"{evaluate}: set it to {-(-every // evaluate) * evaluate}"
            )
        if self.backend == "inline" and self.address is not None:
            raise ValueError(f"address is {self.address}, but backend inline does not use a cluster: set backend: ray")
        return self

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metrics that rank checkpoints for `checkpoint.keep_best`. The first metric that exists is used."""
        return ("reward", "loss")


class DatasetConfig(RunConfig):
    """Settings of recipes that read their batches from files."""

    data: DataConfig
    """Files for training and evaluation."""

    batch_size: PositiveInt
    """Sequences per step, over all ranks. With several responses per prompt, it counts the responses."""

    @model_validator(mode="after")
    def _check_test(self) -> "DatasetConfig":
        if self.evaluate_every and not self.data.evaluation_files:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
        return self


class OnPolicyConfig(DatasetConfig):
    """Settings of recipes that generate rollouts, score them, and then take a few optimizer steps per training step."""

    # The order matters, because some defaults derive from earlier fields: the number of updates from the sizes, the
    # temperature from the rollout, and the reference from actor and algorithm.

    samples_per_prompt: PositiveInt = 1
    """Responses per prompt. A step uses batch_size / samples_per_prompt prompts."""

    minibatch_size: PositiveInt
    """Sequences per optimizer step, over all ranks. If it does not divide batch_size, the last minibatch of an epoch is
    smaller.
    """

    ppo_epochs: PositiveInt = 1
    """Training passes over the sequences of a step."""

    rollout: RolloutConfig
    """Generation settings."""

    schedule: AnySchedule = SyncSchedule()
    """Overlap of generation and training."""

    actor: ActorConfig
    """The policy that is trained."""

    algorithm: AnyAdvantage
    """Advantage estimation, reward shaping and off-policy correction."""

    reference: ReferenceConfig | None = Field(default=None, validate_default=True)
    """The reference for the KL. It is loaded only if a KL term uses it. Null uses the actor's initial model."""

    reward: RewardConfig
    """The reward function or model."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the held-out prompts in `data`."""

    @classmethod
    def uses_reference(cls, actor: ActorConfig, algorithm: AnyAdvantage) -> bool | None:
        """Returns whether a KL term uses the reference. None: user functions may use it, so it is loaded if it is set.

        A recipe that uses the reference in another way overrides this method.
        """
        if actor.kl_loss_coef or algorithm.kl_penalty is not None:
            return True
        return None if ":" in f"{actor.loss.kind}{algorithm.estimator}" else False

    @field_validator("reference", mode="after")
    @classmethod
    def _resolve_reference(cls, reference: ReferenceConfig | None, info: ValidationInfo) -> ReferenceConfig | None:
        """Replaces null by the actor's model if a KL term needs a reference, and an unused reference by null."""
        actor, algorithm = info.data.get("actor"), info.data.get("algorithm")
        if actor is None or algorithm is None:
            return reference  # A missing group has an error of its own.
        is_used = cls.uses_reference(actor, algorithm)
        if is_used and reference is None:
            return ReferenceConfig(model=actor.model, engine=actor.engine, temperature=actor.temperature)
        return None if is_used is False else reference

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns steps times minibatches times epochs."""
        num_minibatches = -(-settings["batch_size"] // settings["minibatch_size"])
        return settings["steps"] * num_minibatches * settings["ppo_epochs"]

    @property
    def compared_by(self) -> tuple[str, ...]:
        """Metrics that rank checkpoints for `checkpoint.keep_best`. They include the accuracy only if it is evaluated
        periodically.
        """
        return ("accuracy",) if self.evaluate_every else super().compared_by

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts per step."""
        return self.batch_size // self.samples_per_prompt

    @model_validator(mode="after")
    def _check_sizes(self) -> "OnPolicyConfig":
        size, samples = self.batch_size, self.samples_per_prompt
        if size % samples:
            near = max(size // samples, 1) * samples
            raise ValueError(f"batch_size is {size}, not a multiple of samples_per_prompt, {samples}: set it to {near}")
        if self.minibatch_size > size:
            raise ValueError(f"minibatch_size is {self.minibatch_size}, more than batch_size: set at most {size}")
        schedule, prompts = self.schedule, self.prompts_per_step
        if isinstance(schedule, AsyncSchedule) and schedule.overprovision > prompts:
            raise ValueError(
                f"schedule.overprovision is {schedule.overprovision}, more than prompts per step: set at most {prompts}"
            )
        return self

    @field_validator("algorithm")
    @classmethod
    def _resolve_correction(cls, algorithm: AnyAdvantage, info: ValidationInfo) -> AnyAdvantage:
        """Replaces `correction: auto` by the actual correction, so that config.yaml records it."""
        actor, rollout, schedule = (info.data.get(name) for name in ("actor", "rollout", "schedule"))
        if algorithm.correction != "auto" or actor is None or rollout is None or schedule is None:
            return algorithm  # A missing group has an error of its own.
        is_exact = rollout.capabilities.matches_trainer and rollout.quantization is None
        differs = schedule.staleness > 0 or not is_exact
        is_weighted = actor.loss.kind == "decoupled_ppo" or actor.old_logprobs == "rollout"
        correction = WeightCorrection(kind="truncated") if differs and not is_weighted else None
        return algorithm.model_copy(update={"correction": correction})

    @model_validator(mode="after")
    def _check_correction(self) -> "OnPolicyConfig":
        correction = self.algorithm.applied_correction
        if self.actor.loss.kind == "decoupled_ppo" and isinstance(correction, WeightCorrection):
            raise ValueError(
                f"algorithm.correction.kind is {correction.kind}, but actor.loss decoupled_ppo has its own weights: "
                "remove the correction, or set actor.loss: ppo"
            )
        quantization = self.rollout.quantization
        is_weighted = correction is not None and correction.kind != "rejection"
        if quantization is not None and not is_weighted and self.actor.loss.kind != "decoupled_ppo":
            name = "rejection" if correction else "null"
            fix = "actor.old_logprobs: auto" if self.actor.old_logprobs == "rollout" else "algorithm.correction: auto"
            raise ValueError(
                f"rollout.quantization is {quantization} and algorithm.correction is {name}, but a quantized rollout "
                f"requires importance weights: set {fix}"
            )
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
    def _resolve_old_logprobs(self) -> "OnPolicyConfig":
        """Replaces `actor.old_logprobs: auto`, so that config.yaml records the choice. Rejects a wrong choice."""
        algorithm, loss, chosen = self.algorithm, self.actor.loss, self.actor.old_logprobs
        num_updates = -(-self.batch_size // self.minibatch_size) * self.ppo_epochs
        readers = {
            "algorithm.kl_coef": algorithm.kl_penalty is not None,
            "algorithm.correction": algorithm.applied_correction is not None,
            f"actor.loss {loss.kind}": loss.NEEDS_OLD_LOGPROBS,
            f"algorithm.estimator {algorithm.estimator}": algorithm.NEEDS_OLD_LOGPROBS,
        }
        reader = next((setting for setting, reads in readers.items() if reads), None)
        comparing = readers | {"rollout.check strict": self.rollout.check == "strict"}
        names = ("algorithm.correction", "actor.loss decoupled_ppo", "rollout.check strict")
        comparer = next((name for name in names if comparing.get(name)), None)
        if chosen == "current" and (reader or num_updates > 1):
            needs = f"{reader} needs old log-probabilities before the update"
            reason = f"a step has {num_updates} updates" if num_updates > 1 else needs
            raise ValueError(f"actor.old_logprobs is current, but {reason}: set auto or recompute")
        if chosen == "rollout" and comparer:
            raise ValueError(
                f"actor.old_logprobs is rollout, but {comparer} compares old and rollout log-probabilities, so it "
                f"would have no effect: set auto or recompute, or remove {comparer}"
            )
        if chosen == "auto":
            exact = "current" if num_updates == 1 and not reader else None
            chosen = exact or ("rollout" if self._rollout_matches_actor and not comparer else "recompute")
            # The model is frozen, and a validator after all fields may not return another instance.
            object.__setattr__(self, "actor", self.actor.model_copy(update={"old_logprobs": chosen}))
        return self

    @property
    def _rollout_matches_actor(self) -> bool:
        """Whether the rollout computes the actor's log-probabilities from the same weights, in float32."""
        rollout, actor, roles = self.rollout, self.actor, self.placement.roles
        return (
            rollout.capabilities.matches_trainer
            and rollout.capabilities.shares_weights
            and rollout.quantization is None
            and self.schedule.staleness == 0
            and {actor.model.dtype, actor.engine.compute_dtype or actor.model.dtype} == {"float32"}
            and actor.lora is None
            and actor.temperature == rollout.temperature
            and {"actor", "rollout"} <= set(roles)
            and self.placement.role("actor") == self.placement.role("rollout")
            and self.placement.role("actor").tp == 1
        )

    def check_served_dtype(self) -> None:
        """Raises ConfigError if the weights do not have the dtype that the quantized matrix products require."""
        dtype = self.rollout.sent_dtype or self.actor.model.dtype
        if problem := quantized_dtype_problem("rollout", self.rollout, dtype):
            raise ConfigError(problem)

    @model_validator(mode="after")
    def _check_engine(self) -> "OnPolicyConfig":
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
    def _check_rollout(self) -> "OnPolicyConfig":
        rollout = self.rollout
        longest = rollout.max_model_len
        needed = self.data.max_prompt_tokens + rollout.max_response_tokens
        if longest is not None and longest < needed:
            raise ValueError(
                f"rollout.{rollout.name_setting('max_model_len')} is {longest}, less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens, {needed}: set {needed} or more"
            )
        if rollout.top_k or rollout.top_p < 1:
            raise ValueError(
                f"rollout.top_k is {rollout.top_k}, top_p is {rollout.top_p:g}, but the loss needs top_k: 0, top_p: 1.0"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> "OnPolicyConfig":
        limit = self.rollout.max_response_tokens
        for shaping in self.algorithm.shaping:
            if isinstance(shaping, LengthPenalty) and self.samples_per_prompt < 2:
                raise ValueError(
                    "samples_per_prompt is 1, but algorithm.shaping length_penalty requires 2 or more: increase it"
                )
            if isinstance(shaping, OverlongPenalty) and (start := shaping.max_length - shaping.buffer) >= limit:
                raise ValueError(
                    f"algorithm.shaping overlong_penalty starts at max_length - buffer = {start} tokens, but "
                    f"rollout.max_response_tokens is {limit}, so it would have no effect: lower max_length"
                )
        penalty = self.algorithm.kl_penalty
        control = None if penalty is None else penalty.kl_control
        # A step changes the coefficient by at most a fraction of 0.2 * batch_size / horizon, which must stay below 1.
        if isinstance(control, AdaptiveKl) and self.batch_size >= 5 * control.horizon:
            raise ValueError(
                f"algorithm.kl_control.horizon is {control.horizon:g}, at most a fifth of batch_size, "
                f"{self.batch_size}, so one step could reduce the coefficient to 0: set it to {self.batch_size} or more"
            )
        return self
