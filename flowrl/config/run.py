"""Settings of every run (`RunConfig`), and of runs that train on their own rollouts (`OnPolicyConfig`)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

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
    RolloutConfig,
    TrainedConfig,
    int4_on_cpu,
)
from flowrl.config.schedule import AnySchedule, AsyncSchedule, SyncSchedule


class DataConfig(Config):
    """JSON-lines files of conversations; `docs/batch.md` has the row format."""

    train: FilePath
    """Training file."""

    test: FilePath | None = None
    """Evaluation file; null disables evaluation."""

    max_prompt_tokens: PositiveInt
    """Maximum number of tokens of a prompt. A longer prompt raises an error with file and line before the run
    starts.
    """

    evaluation_rows: PositiveInt | None = None
    """Number of rows per evaluation, from the start of the file; null uses all rows."""

    shuffle: bool = True
    """Shuffle the training rows in every epoch, with the run's seed. False keeps the order of the file."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.evaluation_rows is not None and self.test is None:
            raise ValueError(f"evaluation_rows is {self.evaluation_rows}, but there is no test file: set test")
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
    """Base class of recipe configs. A recipe adds its roles, its algorithm and its batch sizes (in sequences)."""

    roles: ClassVar[tuple[str, ...]] = ()
    """Roles of the recipe. The placement must assign each role to a pool."""

    def dedicated_roles(self) -> tuple[str, ...]:
        """Returns the roles that require dedicated processes."""
        return tuple(name for name, value in self if isinstance(value, RolloutConfig) and value.engine == "vllm")

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
    def count_updates(cls, settings: Mapping[str, Any]) -> int | None:
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


class OnPolicyConfig(RunConfig):
    """Settings of recipes that generate rollouts, score them, and then take a few optimizer steps per training step."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "rollout", "reference", "reward")

    # The sizes precede the trained roles, because the number of updates is the default of optimizer.total_steps.

    batch_size: PositiveInt
    """Sequences per step: prompts times samples_per_prompt."""

    samples_per_prompt: PositiveInt = 1
    """Responses per prompt. A step uses batch_size / samples_per_prompt prompts."""

    minibatch_size: PositiveInt
    """Sequences per optimizer step, over all ranks. If it does not divide batch_size, the last minibatch of an epoch is
    smaller.
    """

    ppo_epochs: PositiveInt = 1
    """Training passes over the sequences of a step."""

    actor: ActorConfig
    """The policy that is trained."""

    reference: ReferenceConfig
    """The reference model for the KL."""

    reward: RewardConfig
    """The reward function or model."""

    rollout: RolloutConfig
    """Generation settings."""

    schedule: AnySchedule = SyncSchedule()
    """Overlap of generation and training."""

    algorithm: AnyAdvantage
    """Advantage estimation, reward shaping and off-policy correction."""

    data: DataConfig
    """Prompts for training and evaluation."""

    @classmethod
    def count_updates(cls, settings: Mapping[str, Any]) -> int | None:
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
        differs = schedule.staleness > 0 or rollout.quantization is not None or rollout.engine != "hf"
        correction = WeightCorrection(kind="truncated") if differs and actor.loss.kind != "decoupled_ppo" else None
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
            raise ValueError(
                f"rollout.quantization is {quantization} and algorithm.correction is {name}, but a quantized rollout "
                f"requires importance weights: set algorithm.correction: auto"
            )
        if quantization == "int4" and self.placement.device == "cpu":
            raise ValueError(int4_on_cpu("rollout"))
        if self.rollout.engine == "vllm" and (self.rollout.sent_dtype or self.actor.model.dtype) == "float64":
            raise ValueError(
                "rollout.engine is vllm, which has no float64, but actor.model.dtype is float64: set "
                "rollout.vllm.dtype: float32"
            )
        # Whether device auto supports int4 is known only when the run is planned.
        if quantization != "int4" or self.placement.device != "auto":
            self.check_served_dtype()
        return self

    def check_served_dtype(self) -> None:
        """Raises ConfigError if the weights do not have the dtype that the quantized matrix products require."""
        dtype = self.rollout.sent_dtype or self.actor.model.dtype
        if self.rollout.quantization in ("int4", "fp8") and dtype != "bfloat16":
            raise ConfigError(
                f"rollout.quantization is {self.rollout.quantization}, which vLLM computes in bfloat16, but the "
                f"weights are {dtype}: set rollout.vllm.dtype: bfloat16"
            )

    @model_validator(mode="after")
    def _check_rollout(self) -> "OnPolicyConfig":
        rollout = self.rollout
        longest = None if rollout.vllm is None else rollout.vllm.max_model_len
        needed = self.data.max_prompt_tokens + rollout.max_response_tokens
        if longest is not None and longest < needed:
            raise ValueError(
                f"rollout.vllm.max_model_len is {longest}, less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens, {needed}: set {needed} or more"
            )
        if self.evaluate_every and self.data.test is None:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
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
