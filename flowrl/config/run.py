"""What every recipe sets, and what every recipe that learns from its own rollouts sets."""

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowrl.config.algorithm.advantage import AdvantageConfig, CorrectionConfig
from flowrl.config.base import Config, ConfigError, FilePath, ImportName
from flowrl.config.checkpoint import CheckpointConfig
from flowrl.config.data import DataConfig
from flowrl.config.placement import SINGLE, Placement
from flowrl.config.report import ReportConfig
from flowrl.config.roles import ActorConfig, ReferenceConfig, RewardConfig, RolloutConfig, int4_on_cpu
from flowrl.config.schedule import ScheduleConfig


class RunConfig(Config):
    """The base of recipe configs. A recipe adds its roles, its algorithm and its sizes, all in sequences."""

    roles: ClassVar[tuple[str, ...]] = ()
    """Roles that the recipe drives; its placement must give each of them a pool."""

    def apart(self) -> tuple[str, ...]:
        """Roles that need processes of their own."""
        return tuple(name for name, value in self if isinstance(value, RolloutConfig) and value.engine == "vllm")

    recipe: ImportName | None = None
    """`module:Class` of the config class that reads this file; `flowrl` commands find it by this key."""

    output: FilePath
    """Folder of the run's results; one that holds another run is refused."""

    resume: Literal["never", "auto"] = "never"
    """`auto`: if output holds a run of this config, go on after its newest checkpoint; `never`: refuse the folder."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run saves what it can go on from."""

    report: ReportConfig = ReportConfig()
    """Optional outputs: plots and TensorBoard events."""

    restarts: NonNegativeInt = 3
    """How often the run may start failed roles again, in this program, and go on after its newest checkpoint; without a
    checkpoint (checkpoint.every: 0) a failure ends it."""

    seed: NonNegativeInt = 0
    """Fixes the order of the data and every sampled token."""

    backend: Literal["ray", "inline"] = "ray"
    """`ray`: a process per device; `inline`: everything in the driver's process, for debugging."""

    address: str | None = None
    """Ray cluster to join (`auto`, or host:port); null starts one here for the length of the run."""

    placement: Placement = SINGLE
    """Where roles run: a mapping, or the path of a file such as placement/split.yaml."""

    devices: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None
    """Devices of each node that the run may use, for example [8, 8]; null asks the machine."""

    threads: PositiveInt | None = None
    """CPU threads that torch uses in each process; null shares the cores evenly among the processes."""

    call_timeout_s: PositiveFloat | None = 1800.0
    """Seconds that one call of a worker may run before its process counts as stuck; null: no limit."""

    steps: PositiveInt
    """Steps of the recipe's loop."""

    evaluate_every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last only."""

    @model_validator(mode="after")
    def _check_best(self) -> "RunConfig":
        every, evaluate = self.checkpoint.every, self.evaluate_every
        if self.checkpoint.keep_best and evaluate and every % evaluate:
            raise ValueError(
                f"checkpoint.keep_best compares held-out accuracy, but checkpoint.every is {every}, not a multiple of "
                f"evaluate_every, {evaluate}: set it to {-(-every // evaluate) * evaluate}"
            )
        return self

    @property
    def compared_by(self) -> tuple[str, ...]:
        """The metrics that `checkpoint.keep_best` compares checkpoints by: the first that steps have."""
        return ("reward", "loss")

    @model_validator(mode="after")
    def _check_address(self) -> "RunConfig":
        if self.backend == "inline" and self.address is not None:
            raise ValueError(f"address is {self.address}, but backend inline joins no cluster: set backend: ray")
        return self


class OnPolicyConfig(RunConfig):
    """What recipes that train on fresh rollouts share: generate, score, then a few updates per step."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "rollout", "reference", "reward")

    actor: ActorConfig
    """The policy."""

    reference: ReferenceConfig
    """Where the KL is measured from."""

    reward: RewardConfig
    """What scores responses."""

    rollout: RolloutConfig
    """How responses are sampled."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Whether responses are generated while earlier ones are trained on."""

    algorithm: AdvantageConfig
    """From scores to advantages."""

    data: DataConfig
    """The prompts."""

    batch_size: PositiveInt
    """Sequences generated and trained on in one step, all samples of all prompts counted."""

    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt; a step reads batch_size / samples_per_prompt prompts."""

    minibatch_size: PositiveInt
    """Sequences of one optimizer step, over all ranks."""

    ppo_epochs: PositiveInt = 1
    """Passes over a step's sequences."""

    @property
    def compared_by(self) -> tuple[str, ...]:
        """The accuracy, where every checkpoint has one: that of the last step alone would be compared with nothing."""
        return ("accuracy",) if self.evaluate_every else super().compared_by

    @property
    def prompts_per_step(self) -> int:
        """Prompts read in one step."""
        return self.batch_size // self.samples_per_prompt

    @model_validator(mode="after")
    def _check_sizes(self) -> "OnPolicyConfig":
        rows, samples = self.batch_size, self.samples_per_prompt
        if rows % samples:
            near = max(rows // samples, 1) * samples
            raise ValueError(f"batch_size is {rows}, not a multiple of samples_per_prompt, {samples}: set it to {near}")
        if self.minibatch_size > rows:
            raise ValueError(f"minibatch_size is {self.minibatch_size}, more than batch_size: set at most {rows}")
        return self

    @model_validator(mode="after")
    def _check_redundancy(self) -> "OnPolicyConfig":
        overprovision, prompts = self.schedule.overprovision or 0, self.prompts_per_step
        if overprovision > prompts:
            raise ValueError(
                f"schedule.overprovision is {overprovision}, more than the {prompts} prompts of a step (batch_size "
                f"/ samples_per_prompt), so that more may be dropped than is trained: set at most {prompts}"
            )
        return self

    @field_validator("algorithm")
    @classmethod
    def _resolve_correction(cls, algorithm: AdvantageConfig, info: ValidationInfo) -> AdvantageConfig:
        """Puts what is made in place of `auto`, so that a config that was written down says it."""
        actor, rollout, schedule = (info.data.get(name) for name in ("actor", "rollout", "schedule"))
        if algorithm.correction != "auto" or actor is None or rollout is None or schedule is None:
            return algorithm  # or a setting that this depends on is refused
        differs = schedule.staleness > 0 or rollout.quantization is not None or rollout.engine != "hf"
        made = CorrectionConfig(kind="truncated") if differs and actor.loss != "decoupled_ppo" else None
        return algorithm.model_copy(update={"correction": made})

    @model_validator(mode="after")
    def _check_correction(self) -> "OnPolicyConfig":
        correction = self.algorithm.applied_correction
        if self.actor.loss == "decoupled_ppo" and correction is not None and correction.kind in ("truncated", "masked"):
            raise ValueError(
                f"algorithm.correction.kind is {correction.kind}, but actor.loss decoupled_ppo has the same importance "
                "weight in its formula, and it would count twice: remove the correction, or set actor.loss: ppo"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> "OnPolicyConfig":
        quantization, correction = self.rollout.quantization, self.algorithm.applied_correction
        # decoupled_ppo has the weight in its formula.
        weighs = self.actor.loss == "decoupled_ppo" or (correction is not None and correction.kind != "rejection")
        if quantization is not None and not weighs:
            found = "is null" if correction is None else "drops tokens and weighs none"
            raise ValueError(
                f"rollout.quantization is {quantization}, so that responses come from another policy than the one that "
                f"is trained, but algorithm.correction {found}: set algorithm.correction: auto"
            )
        if quantization == "int4" and self.placement.device == "cpu":
            raise ValueError(int4_on_cpu("rollout"))
        # Which devices `auto` is, and so whether there can be int4 at all, is known where the run is planned.
        if quantization != "int4" or self.placement.device != "auto":
            self.check_served_dtype()
        return self

    def check_served_dtype(self) -> None:
        """Refuses weights of another type than that in which they are multiplied once quantised. Raises ConfigError."""
        dtype = self.rollout.sent_dtype or self.actor.model.dtype
        if self.rollout.quantization in ("int4", "fp8") and dtype != "bfloat16":
            raise ConfigError(
                f"rollout.quantization is {self.rollout.quantization}, which vLLM computes in bfloat16, but its "
                f"weights would be {dtype}: set rollout.vllm.dtype: bfloat16"
            )

    @model_validator(mode="after")
    def _check_row_tokens(self) -> "OnPolicyConfig":
        longest = None if self.rollout.vllm is None else self.rollout.vllm.max_model_len
        needed = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if longest is not None and longest < needed:
            raise ValueError(
                f"rollout.vllm.max_model_len is {longest}, less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens, {needed}: set it to {needed} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> "OnPolicyConfig":
        if self.evaluate_every and self.data.test is None:
            raise ValueError(f"evaluate_every is {self.evaluate_every}, but there is no test file: set data.test")
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> "OnPolicyConfig":
        rollout = self.rollout
        if rollout.top_k or rollout.top_p < 1:
            raise ValueError(
                f"rollout.top_k is {rollout.top_k} and rollout.top_p is {rollout.top_p:g}: the loss would be "
                "that of another distribution than the one sampled from; set top_k: 0 and top_p: 1.0"
            )
        return self

    @model_validator(mode="after")
    def _check_shaping(self) -> "OnPolicyConfig":
        limit = self.rollout.max_response_tokens
        for shaping in self.algorithm.shaping:
            if shaping.kind == "length_penalty" and self.samples_per_prompt < 2:
                raise ValueError(
                    "samples_per_prompt is 1, and algorithm.shaping length_penalty compares the samples of one prompt: "
                    "set it to 2 or more, or use overlong_penalty"
                )
            if shaping.max_length is not None and shaping.buffer is not None:
                begins = shaping.max_length - shaping.buffer
                if begins >= limit:
                    raise ValueError(
                        f"algorithm.shaping overlong_penalty begins above max_length - buffer = {begins} tokens, but "
                        f"rollout.max_response_tokens is {limit}: no response would be punished, lower max_length"
                    )
        return self

    @model_validator(mode="after")
    def _check_kl_control(self) -> "OnPolicyConfig":
        control = self.algorithm.kl_control
        # A step changes the coefficient by at most 0.2 rows / horizon, and so could bring it to 0.
        if control is not None and control.horizon is not None and self.batch_size >= 5 * control.horizon:
            raise ValueError(
                f"algorithm.kl_control.horizon is {control.horizon:g}, at most a fifth of batch_size, "
                f"{self.batch_size}, so that one step could bring the coefficient to 0: set it to "
                f"{self.batch_size} or more"
            )
        return self
