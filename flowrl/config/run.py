"""Settings of every run (`RunConfig`), and of runs that read files (`DatasetConfig`)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowrl.config.base import Config, Dependency, FilePath, ImportName
from flowrl.config.data.data_settings import DataConfig
from flowrl.config.model import ExportConfig, OptimizerConfig
from flowrl.config.monitoring.health_settings import HealthConfig
from flowrl.config.monitoring.tracker_settings import AnyTracker
from flowrl.config.placement import SINGLE, Placement
from flowrl.config.rewards.reward_settings import RewardConfig
from flowrl.config.roles import (
    ActorConfig,
    ReferenceConfig,
    RoleConfig,
    StudentConfig,
    TrainedConfig,
    roles_of,
)
from flowrl.config.setting_tree import config_classes

SettingValues = Mapping[str, Any]  # Any: settings have different types
"""Values of the settings of a config, by name."""


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
    """Number of best checkpoints to keep in addition. With evaluate_every, they are ranked by the held-out accuracy,
    the validation loss of SFT, or the agreement of a student with its teacher. Otherwise, they are ranked by the
    reward, or without a reward by the training loss.
    """

    asynchronous: bool = True
    """Write checkpoints in the background from a copy in host memory. False blocks the step until the files are
    written.
    """

    DEPENDENCIES = (
        Dependency(("keep_best",), lambda group: group.every, "every is 0, so nothing is saved: set every"),
        Dependency(
            ("keep_last", "asynchronous"),
            lambda group: group.every,
            "every is 0, so no checkpoint is saved: set every, or remove it",
            is_error=False,
        ),
    )


class RolloutLogConfig(Config):
    """Generated text in the folder `rollouts/` of the output folder; `docs/generated_text.md` has the format."""

    every: NonNegativeInt = 5
    """Number of steps between saved training rows; step 1 is also saved. 0 saves no training rows. Every evaluation is
    saved.
    """

    rows: PositiveInt | Literal["all"] = 8
    """Number of training rows per saved step, at equal distances in the batch. `all`, or a number larger than the
    batch, saves the complete batch. Evaluations save all rows.
    """

    token_rows: NonNegativeInt = 4
    """Number of saved training rows per step for which values per token are also saved, such as log-probabilities and
    advantages. These rows are at equal distances among the saved rows.
    """

    max_mb: PositiveFloat | None = 1000.0
    """Maximum size of `rollouts/` in megabytes; null keeps everything. The oldest steps are removed first. The first
    and the latest evaluation and the latest training rows are always kept.
    """

    DEPENDENCIES = (
        Dependency(
            ("rows", "token_rows"),
            lambda group: group.every,
            "every is 0, so no training rows are saved: set every, or remove it",
            is_error=False,
        ),
    )

    @field_validator("rows", mode="before")
    @classmethod
    def _check_rows(cls, value: object) -> object:
        # Otherwise, a wrong value has one error for each type.
        if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"rows is {value!r}: set a number of rows of at least 1, or all")


class ProfileConfig(Config):
    """Profiles of calls in the folder `profiles/` of the output folder; `docs/observability.md` has an example."""

    steps: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)]
    """Steps of which profiles are recorded, such as [10]. Select later steps, because the first steps are atypical."""

    ranks: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = (0,)
    """Ranks whose calls are recorded, in each role."""


class ReportConfig(Config):
    """Optional outputs of a run. `metrics.jsonl`, `trace.json` and `summary.json` are always written."""

    tensorboard: bool = True
    """Writes every metric, and a few rows of generated text, to TensorBoard events in `tensorboard/`."""

    trackers: Annotated[tuple[AnyTracker, ...], Field(strict=False)] = ()
    """Trackers that receive metrics, saved rows and results: names, or mappings with the settings of a tracker."""

    rollouts: RolloutLogConfig | None = RolloutLogConfig()
    """Saves prompts, responses and scores in `rollouts/`; null saves none. Runs without rollouts, such as SFT, have no
    generated text.
    """

    profile: ProfileConfig | None = None
    """Records profiles of the calls of some steps with torch's profiler; null records none. The calls of these steps
    take longer.
    """

    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s (10^12 per second) of a device, to which `usage/ROLE/mfu` is relative. Null uses the GPU's data
    sheet value for dense bfloat16 matrix products. For devices without a known value, null disables this metric.
    """

    @model_validator(mode="after")
    def _check_trackers(self) -> "ReportConfig":
        kinds = [tracker.kind for tracker in self.trackers]
        if repeated := [kind for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]:
            raise ValueError(f"trackers has {repeated[0]} more than once: keep one")
        return self


class RunConfig(Config):
    """Base class of recipe configs. A recipe adds its roles, its algorithm and its batch sizes (in sequences).

    Each field whose value is a `RoleConfig` defines a role with the name of the field.
    """

    LENGTH_SETTINGS: ClassVar[tuple[str, ...]] = ("steps",)
    """Settings that determine the number of steps, for messages."""

    @property
    def role_settings(self) -> dict[str, RoleConfig]:
        """Settings of each role of the run."""
        return roles_of(self)

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
        return tuple(name for name, value in self.role_settings.items() if value.needs_own_process)

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

    export: ExportConfig = ExportConfig()
    """Files of the trained model in `model/`."""

    report: ReportConfig = ReportConfig()
    """Optional outputs: TensorBoard events, trackers, profiles and generated text."""

    health: HealthConfig = HealthConfig()
    """Health checks of each step, and their thresholds."""

    record: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Steps to record for `flowrl replay`, such as [7]. `recorded/` of the output folder then contains the batch of the
    step, the state of every role before the step, and the results of the calls.
    """

    restarts: NonNegativeInt = 3
    """Maximum number of restarts from the latest checkpoint after failures. Without a checkpoint, a run restarts from
    step 0, but only after a lost process or a missed deadline.
    """

    seed: NonNegativeInt = 0
    """Seed of the data order and of all sampled tokens."""

    deterministic: bool = False
    """Make a run on GPUs repeatable bit by bit, with torch's deterministic algorithms and vLLM's batch-invariant mode.
    Both are slower. Runs on CPUs are repeatable without this setting.
    """

    backend: Literal["ray", "inline"] = "ray"
    """`ray`: one process per device. `inline`: all roles in the driver process, for debugging."""

    address: str | None = None
    """Ray cluster to join (`auto`, or host:port); null starts a local cluster for the duration of the run."""

    placement: Placement = SINGLE
    """Placement of the roles: a mapping, the name of an included placement such as `split`, or the path of a file."""

    devices: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None
    """Number of devices to use on each node, such as [8, 8]; null uses all devices of the machine or cluster."""

    threads: PositiveInt | None = None
    """Number of torch CPU threads per process. Null uses the environment variable OMP_NUM_THREADS. Without this
    variable, the usable CPUs of a node are divided evenly among its processes.
    """

    fork_workers: bool | Literal["auto"] = "auto"
    """Fork the worker processes of a local run from a server that has already imported torch, so that they start
    faster. `auto` forks them if the placement is on CPUs. No effect with `address`. If an import of the server has used
    CUDA, Python starts the processes instead.
    """

    call_timeout_s: PositiveFloat | None = 1800.0
    """Timeout of one worker call in seconds. After the timeout, the worker's process counts as stuck and is ended. Null
    disables the timeout.
    """

    start_timeout_s: PositiveFloat | None = 1800.0
    """Timeout in seconds for the start of a worker: its imports and its constructor, which loads the model. It also
    limits the start of a replacement process. Null disables the timeout.
    """

    steps: PositiveInt
    """Number of training steps."""

    evaluate_every: NonNegativeInt | None = None
    """Number of steps between evaluations. Null evaluates only before the first step and after the last step; 0
    disables evaluation. `data.tests.NAME.every` replaces this setting for one set.
    """

    def evaluation_interval(self, name: str) -> int | None:
        """Returns the number of steps between evaluations of a held-out set, by its name. See `evaluate_every`."""
        return self.evaluate_every

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns the number of optimizer updates of each trained role in a run. None if the recipe does not define it.

        A recipe config overrides this method, so that `optimizer.total_steps` can be null. `settings` maps names to
        values.
        """
        return None

    @classmethod
    def is_length_known(cls, settings: SettingValues) -> bool:
        """Returns whether `settings` determine the number of steps. If not, the recipe derives the number from data."""
        return True

    @property
    def precomputed_roles(self) -> tuple[str, ...]:
        """Roles whose calls run once before the first step, and not in every step."""
        return ()

    @property
    def num_updates(self) -> int | None:
        """Number of optimizer updates of each trained role in the run, or None if it is unknown."""
        return self.count_updates(dict(self))

    @property
    def can_end_early(self) -> bool:
        """Whether a run may have fewer updates than `num_updates`, depending on its data."""
        return False

    @field_validator("*", mode="after")
    @classmethod
    def _derive_total_steps(cls, value: Any, info: ValidationInfo) -> Any:  # Any: the value of any setting
        """Replaces a null `optimizer.total_steps`, so that config.yaml records the end of the schedule."""
        optimizer = value.optimizer if isinstance(value, TrainedConfig) else value
        if not isinstance(optimizer, OptimizerConfig) or optimizer.schedule == "constant":
            return value
        try:
            if not cls.is_length_known(info.data):
                return value
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
        """Replaces a null temperature of a policy by the rollout's temperature, so that config.yaml records it.

        Also replaces a null `policy_tokenizer` of reward models by the actor's tokenizer, and a null `policy_template`
        by `data.template`. The config class must declare `actor` and `data` before `reward`.
        """
        rollout, actor = info.data.get("rollout"), info.data.get("actor")
        if isinstance(value, RewardConfig) and isinstance(actor, TrainedConfig):
            data = info.data.get("data")
            return value.of_policy(actor.model.tokenizer_path, data.template if isinstance(data, DataConfig) else None)
        if not isinstance(value, ActorConfig | StudentConfig | ReferenceConfig) or value.temperature is not None:
            return value
        return value if rollout is None else value.model_copy(update={"temperature": rollout.temperature})

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
    def records_steps(self) -> bool:
        """Whether the run may record a step for `flowrl replay`."""
        return bool(self.record or self.health.record_on)

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

    @property
    def measures_success(self) -> bool:
        """Whether the run measures the success of prompts, so that `data` can select prompts by their success."""
        return False

    @model_validator(mode="after")
    def _check_order(self) -> "DatasetConfig":
        if self.data.needs_success and not self.measures_success:
            setting = "order is curriculum" if self.data.order == "curriculum" else "difficulty has min or max"
            raise ValueError(
                f"data.{setting}, but only a run that trains on rewards measures the success of prompts, and "
                f"{type(self).__name__} does not: set data.order: shuffle, and remove data.difficulty"
            )
        return self

    def evaluation_interval(self, name: str) -> int | None:
        own = self.data.tests[name].every if name in self.data.tests else None
        return self.evaluate_every if own is None else own

    @property
    def evaluates_responses(self) -> bool:
        """Whether evaluations generate responses, so that a set can have its own number of samples and temperature."""
        return False

    @model_validator(mode="after")
    def _check_test(self) -> "DatasetConfig":
        if self.evaluate_every and not self.data.evaluation_files:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
        own = [name for name, held_out in self.data.tests.items() if held_out.evaluation is not None]
        if own and not self.evaluates_responses:
            raise ValueError(
                f"data.tests.{own[0]}.evaluation is set, but the evaluations of this recipe generate no responses: "
                "remove it"
            )
        return self
