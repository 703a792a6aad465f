"""Settings of each role: its model, its engine, and its processing of a batch."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flowrl.config.algorithm.loss_settings import AnyDistillation, AnyPolicyLoss, AnyPreference, AnyRewardModelLoss
from flowrl.config.base import Aggregation, Config, Dependency, FilePath, KlKind, Options, TokenIds, parse
from flowrl.config.engines.rollout_engines import (
    DEFAULT_ENGINE,
    ENGINES,
    EngineCapabilities,
    EngineName,
    TransferConfig,
    get_capabilities,
    name_alternatives,
)
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.config.engines.vllm_settings import VllmConfig
from flowrl.config.model import EMBEDDINGS, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig


class RoleConfig(Config):
    """Base class of the settings of a role. A field of the run's config whose value is a `RoleConfig` defines a role
    with the name of the field.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Outputs that the training engine of the role must compute."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        settings = dict(self)
        if isinstance(engine := settings.get("engine"), EngineConfig):
            model = settings.get("model")
            engine.check_role(
                self.OUTPUTS,
                has_adapter=settings.get("lora") is not None,
                model=model if isinstance(model, ModelConfig) else None,
            )
        return self

    def roles(self, name: str) -> dict[str, "RoleConfig"]:
        """Returns role -> settings, for the roles that a field with this name defines. The base class defines one."""
        return {name: self}

    def role_keys(self, name: str) -> dict[str, str]:
        """Returns role -> key of the role's settings, for each role in `self.roles(name)`. Messages name the key."""
        return {name: name}

    def with_roles(self, name: str, roles: Mapping[str, "RoleConfig"]) -> "RoleConfig":
        """Returns a copy in which `roles` replaces the settings of the roles.

        Args:
            name: name of the field.
            roles: role -> new settings, for each role in `self.roles(name)`.
        """
        return roles[name]

    @property
    def needs_own_process(self) -> bool:
        """Whether the role's engine needs processes without other roles."""
        return False


class TrainedConfig(RoleConfig):
    """A role whose model is trained."""

    OUTPUTS = ("logprobs",)

    model: ModelConfig
    """Model with the initial weights."""

    optimizer: OptimizerConfig
    """Optimizer settings."""

    lora: LoraConfig | None = None
    """Settings of a LoRA adapter. With an adapter, only the adapter, `lora.modules_to_save` and the head of a
    critic or reward model are trained. Null trains all weights."""

    router_loss_coef: NonNegativeFloat | None = None
    """Coefficient of the auxiliary loss that balances the experts of a mixture of experts (docs/models.md); 0 omits the
    loss. Null uses `router_aux_loss_coef` of the model's configuration, and is rejected if this value is missing."""

    engine: EngineConfig = EngineConfig()
    """Engine settings."""

    def has_base(self, model: ModelConfig) -> bool:
        """Returns whether `model` equals the role's model with a disabled adapter, so that both can share weights."""
        lora = self.lora
        is_kept = lora is not None and not lora.modules_to_save and lora.base_quantization is None
        return is_kept and self.model.adapter is None and self.model == model

    @property
    def has_frozen_head(self) -> bool:
        """Whether an adapter is trained, but neither the head nor the embeddings."""
        return self.lora is not None and EMBEDDINGS.isdisjoint(m.rpartition(".")[2] for m in self.lora.modules_to_save)

    @property
    def sends_adapter(self) -> bool:
        """Whether a weight sync can send the adapter of the role instead of all weights."""
        # To quantize the base model in each sync takes longer than to send all weights.
        is_exact = self.lora is not None and self.lora.base_quantization is None
        return is_exact and self.engine.capabilities.adapters

    @model_validator(mode="after")
    def _check_base_quantization(self) -> Self:
        kind = None if self.lora is None else self.lora.base_quantization
        engine = self.engine
        for name, value, is_supported, supported in (
            ("engine.strategy", engine.strategy, engine.strategy != "fsdp", "auto, ddp or zero1"),
            ("engine.offload", engine.offload, engine.offload not in ("parameters", "idle"), "none or optimizer"),
            ("engine.compile", engine.compile, engine.compile is not True, "auto or false"),
            ("model.dtype", self.model.dtype, kind == "nf4" or self.model.dtype != "float64", "float32 or bfloat16"),
        ):
            if kind is not None and not is_supported:
                raise ValueError(
                    f"lora.base_quantization is {kind}, which does not support {name} {str(value).lower()}: set "
                    f"{name} to {supported}, or remove lora.base_quantization"
                )
        return self

    @model_validator(mode="after")
    def _check_router_loss(self) -> Self:
        if self.router_loss_coef is not None and self.engine.kind != DEFAULT_TRAIN_ENGINE:
            raise ValueError(
                f"router_loss_coef is {self.router_loss_coef:g}, but engine.kind {self.engine.kind} does not read it: "
                f"remove it, or set engine.kind: {DEFAULT_TRAIN_ENGINE}"
            )
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        kind = self.optimizer.kind
        if kind == "muon" and self.lora is not None:
            raise ValueError(
                "optimizer.kind is muon, but lora is set: orthogonal updates of the two factors of an adapter are no "
                "orthogonal update of their product; set optimizer.kind: adamw, or remove lora"
            )
        if kind == "adamw_8bit" and self.model.dtype == "float64":
            raise ValueError(
                "optimizer.kind is adamw_8bit, which computes in float32, but model.dtype is float64: set "
                "optimizer.kind: adamw, or model.dtype: float32"
            )
        if kind == "adamw_8bit" and self.engine.offload == "parameters":
            raise ValueError(
                "optimizer.kind is adamw_8bit, but engine.offload is parameters, with which the optimizer runs on the "
                "host, where quantized moments are slow: set optimizer.kind: adamw, or engine.offload: optimizer"
            )
        return self


class ActorConfig(TrainedConfig):
    """The policy that is trained on rollouts, and its loss."""

    OUTPUTS = ("logprobs", "entropy")

    temperature: PositiveFloat | None = None
    """Sampling temperature of the responses. The logits are divided by it before the log-softmax. Null uses
    rollout.temperature.
    """

    loss: AnyPolicyLoss = Field(default_factory=partial(parse, AnyPolicyLoss, "ppo"))
    """Policy loss: a name, or a mapping with its kind and its settings."""

    old_logprobs: Literal["auto", "current", "rollout", "recompute"] = "auto"
    """Source of the old log-probabilities (before the update), with which the loss compares the current ones.
    `current`: the current log-probabilities without gradient. These equal the old ones if a step has one update.
    `rollout`: the column `rollout_logprobs`. `recompute`: an additional forward pass. `auto` selects `current` if a
    step has one update and only the loss reads old log-probabilities. Otherwise, `auto` selects `rollout` if an `hf`
    rollout uses the actor's float32 weights, or else `recompute`.
    """

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the loss."""

    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the loss; 0 omits the term."""

    kl_loss_kind: KlKind = "k3"
    """Estimator of the KL in the loss: a name, or `module:function` for a user function. k1 requires kl_loss_gradient
    or kl_loss_unbiased.
    """

    kl_loss_gradient: Literal["k2", "k3", "abs"] | None = None
    """Estimator of the gradient of the KL in the loss (straight-through); null uses kl_loss_kind. k2 has the gradient
    of KL(policy, reference). The gradient of k1 is not available, because its expectation is 0.
    """

    kl_loss_unbiased: bool = False
    """Multiply the KL in the loss by the ratio of current to old probability, including its gradient (DeepSeek-V3.2).
    Value and gradient of k1 and k3 are then unbiased, also after earlier updates on the same rollouts.
    """

    aggregation: Aggregation = "token_mean"
    """Reduction of per-token losses to one number: a mean over tokens, or a mean over sequences of token sums or
    means.
    """

    aggregation_scale: PositiveFloat | None = None
    """Divisor of each sequence's sum in `seq_mean_token_sum_norm`, usually max_response_tokens."""

    DEPENDENCIES = (
        Dependency(
            ("kl_loss_kind", "kl_loss_gradient", "kl_loss_unbiased"),
            lambda group: group.kl_loss_coef,
            "kl_loss_coef is 0, which omits the KL: set kl_loss_coef, or remove it",
            is_error=False,
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> "ActorConfig":
        needs_scale = self.aggregation == "seq_mean_token_sum_norm"
        if needs_scale and self.aggregation_scale is None:
            raise ValueError("aggregation seq_mean_token_sum_norm requires aggregation_scale: set it")
        if not needs_scale and self.aggregation_scale is not None:
            raise ValueError(f"aggregation {self.aggregation} does not use aggregation_scale: remove it")
        is_corrected = self.kl_loss_gradient is not None or self.kl_loss_unbiased
        if self.kl_loss_coef and self.kl_loss_kind == "k1" and not is_corrected:
            raise ValueError(
                "kl_loss_kind is k1, whose gradient has the expectation 0 and would not keep the policy near the "
                "reference: set kl_loss_gradient: k2, or kl_loss_unbiased: true"
            )
        if self.kl_loss_unbiased and self.kl_loss_gradient is not None:
            raise ValueError(
                f"kl_loss_unbiased is true and kl_loss_gradient is {self.kl_loss_gradient}, but both correct the "
                "gradient: remove one of them"
            )
        if self.kl_loss_unbiased and self.kl_loss_kind in ("k2", "abs"):
            raise ValueError(
                f"kl_loss_unbiased is true, but kl_loss_kind is {self.kl_loss_kind}, whose value is biased: set "
                "kl_loss_kind: k3, or remove kl_loss_unbiased"
            )
        if self.kl_loss_gradient is not None and ":" in self.kl_loss_kind:
            raise ValueError(f"kl_loss_gradient has no effect for kl_loss_kind {self.kl_loss_kind}: remove it")
        return self


RANDOM_HEAD = Dependency(
    ("head_seed",),
    lambda group: group.head == "fresh",
    "it applies only to a random head: set head: fresh, or remove head_seed",
    is_error=False,
)


class CriticConfig(TrainedConfig):
    """The value model that is trained: a causal language model, or a saved critic with its value head."""

    OUTPUTS = ("values",)

    head: Literal["zero", "fresh"] = "zero"
    """Initialization of the value head if the model has none: zeros, or random from N(0, 1 / (hidden size + 1))."""

    head_seed: NonNegativeInt = 0
    """Seed of a random head."""

    value_clip: PositiveFloat | None = 0.2
    """Range of value clipping in PPO: a value that moves further from its old value gets no gradient. Null disables
    clipping.
    """

    DEPENDENCIES = (RANDOM_HEAD,)


class PreferenceActorConfig(TrainedConfig):
    """The policy that is trained on preferences, and its loss."""

    loss: AnyPreference = Field(default_factory=partial(parse, AnyPreference, "dpo"))
    """Preference loss: a name, or a mapping with its kind and its settings."""


class StudentConfig(TrainedConfig):
    """The policy that is trained to agree with a teacher, and its loss."""

    temperature: PositiveFloat | None = None
    """Divisor of the logits before the log-softmax. Null uses rollout.temperature."""

    loss: AnyDistillation = Field(default_factory=partial(parse, AnyDistillation, "sampled_reverse_kl"))
    """Distillation loss: a name, or a mapping with its kind and its settings."""


class RewardModelConfig(TrainedConfig):
    """The reward model that is trained on pairs. Its model is a causal language model, or a saved reward model."""

    OUTPUTS = ("scores",)

    head: Literal["fresh", "from_model"] = "fresh"
    """Initialization of the head. `fresh`: random from N(0, 1 / (hidden size + 1)). `from_model`: the trained head of a
    saved reward model.
    """

    head_seed: NonNegativeInt = 0
    """Seed of a random head."""

    loss: AnyRewardModelLoss = Field(default_factory=partial(parse, AnyRewardModelLoss, "log_sig"))
    """Loss: a name, or a mapping with its kind and its settings."""

    DEPENDENCIES = (RANDOM_HEAD,)


class ReferenceConfig(RoleConfig):
    """A frozen policy, such as the reference for the KL, or a teacher. If a colocated actor trains a LoRA adapter of
    this model, the actor's model with the adapter disabled is used, and no other model is loaded.
    """

    OUTPUTS = ("logprobs",)

    model: ModelConfig
    """Weights of the reference, usually the actor's initial weights."""

    engine: EngineConfig = EngineConfig()
    """Engine settings."""

    temperature: PositiveFloat | None = None
    """Temperature of the log-probabilities. Null uses rollout.temperature."""


class ScoringModelConfig(RoleConfig):
    """A role that can score responses with a reward model."""

    OUTPUTS = ("scores",)

    model: ModelConfig | None = None
    """Sequence-classification model with one label, which scores the responses."""

    policy_tokenizer: FilePath | None = None
    """Folder of the policy's tokenizer. Null uses the actor's tokenizer. If the reward model has a different tokenizer
    or chat template, each conversation is rendered and tokenized again for the reward model.
    """

    policy_template: FilePath | None = None
    """Conversation template file of the policy. Null uses `data.template`."""

    head: Literal["from_model", "fresh"] = "from_model"
    """`from_model` requires a trained head. `fresh` adds a random head from N(0, 1 / (hidden size + 1)) to any causal
    language model. The scores of a fresh head are meaningless; they serve only to test a program."""

    head_seed: NonNegativeInt = 0
    """Seed of a random head."""

    engine: EngineConfig = EngineConfig()
    """Engine settings of the reward model."""

    DEPENDENCIES = (
        Dependency(
            ("head", "head_seed", "engine", "policy_tokenizer", "policy_template"),
            lambda group: group.model,
            "it applies only to reward models: set model, or remove it",
        ),
        RANDOM_HEAD,
    )


DEFAULT_NUM_SEQS = 256
"""Number of sequences if `max_num_seqs` is null. vLLM on GPUs has a default of its own."""


class RolloutConfig(RoleConfig):
    """Generation of responses with the actor's weights."""

    engine: EngineName = DEFAULT_ENGINE
    """`hf`: transformers; runs in the actor's processes if colocated. `vllm`: runs in dedicated processes and requires
    the extra `vllm`. `module:Class`: a user's engine (docs/extend.md).
    """

    vllm: VllmConfig | None = None
    """Settings of the vLLM engine."""

    options: Options = Field(default_factory=dict)
    """Settings of a user's engine."""

    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Quantization of the linear layers at each weight sync; null disables it. It saves memory and time, but changes
    the policy. It therefore requires `algorithm.correction`. `hf` supports int8. For `vllm`, see docs/rollout.md."""

    transfer: TransferConfig = TransferConfig()
    """Weight sync settings."""

    max_response_tokens: PositiveInt
    """Maximum response length including stop tokens and the tokens of an environment. A longer response is truncated
    and marked `truncated`.
    """

    temperature: PositiveFloat = 1.0
    """Sampling temperature, also used for training log-probabilities. Evaluations use evaluation.temperature."""

    top_k: NonNegativeInt = 0
    """Number of most likely tokens from which to sample; 0 uses all tokens."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Total probability of the most likely tokens from which to sample; 1 uses all tokens."""

    stop_ids: Annotated[tuple[TokenIds, ...], Field(strict=False)] = ()
    """Token sequences that end a response, in addition to the EOS token and the stop tokens of the conversation
    template. They remain part of the response."""

    template: FilePath | None = None
    """Conversation template file (docs/data.md) whose stop tokens end a response. Null uses `data.template`. If that is
    null, too, the rollout uses `conversation_template.json` in the tokenizer's folder, or else the chat template.
    """

    keep_turn_cache: bool = True
    """Keep the KV cache of an episode while its environment replies, so that the next turn processes new tokens only.
    The memory grows with the number of episodes that wait. False: each turn prefills all earlier turns again. Only
    engine hf supports false. For vllm, see vllm.prefix_caching."""

    max_num_seqs: PositiveInt | None = None
    """Maximum number of sequences that one rank decodes concurrently. Values below 16 need the memory of 16. Null: 256,
    or vLLM's default on GPUs, which is 1,024 with at least 70 GiB of memory, except on an A100.
    """

    router_replay: bool = False
    """Train a mixture of experts with the experts that the rollout has chosen for each token (docs/models.md). The
    responses then have the column `routes`. Only for `hf`."""

    check_weights: Literal["sampled", "complete", "off"] = "sampled"
    """Comparison of the rollout's weights with the actor's weights after each weight sync. `sampled` compares a few
    columns of some weights. `complete` compares all weights and takes several times as long as the transfer."""

    check: Literal["warn", "strict", "off"] = "warn"
    """Reaction to a `rollout_gap` above gap_warning: log a warning with likely causes, stop the run, or do nothing."""

    gap_warning: PositiveFloat | None = None
    """Threshold of the mean gap between rollout and trainer log-probabilities, in nats per token. Null is 0.001 for
    float32, 0.05 for 16-bit weights and 0.1 for quantized weights."""

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if not all(self.stop_ids):
            raise ValueError("stop_ids has an empty sequence, which would end every response immediately: remove it")
        capabilities, key = self.capabilities, f"engine {self.engine}"
        groups = {known.settings: name for name, known in ENGINES.items()}
        for group, value in self:
            if group in groups and value is not None and group != capabilities.settings:
                raise ValueError(
                    f"{group} is set, but engine is {self.engine}: remove {group}, or set engine: {groups[group]}"
                )
        for option in self.options:
            if option not in capabilities.options:
                available = ", ".join(capabilities.options) or "none"
                raise ValueError(f"options has {option}, which {key} does not have; available: {available}")
        if self.quantization is not None and self.quantization not in capabilities.quantizations:
            others = name_alternatives(lambda known: self.quantization in known.quantizations)
            supported = " or ".join(capabilities.quantizations) or "no quantization"
            raise ValueError(
                f"quantization is {self.quantization}, but {key} supports {supported}: set "
                f"{' or '.join(capabilities.quantizations) or 'null'}, or engine: {others}"
            )
        if self.temperature < capabilities.min_temperature:
            others = name_alternatives(lambda known: self.temperature >= known.min_temperature)
            raise ValueError(
                f"temperature is {self.temperature:g}, but {key} requires at least {capabilities.min_temperature:g}: "
                f"increase it, or set engine: {others}"
            )
        if self.temperature != 1 and not capabilities.logprobs_at_temperature:
            others = name_alternatives(lambda known: known.logprobs_at_temperature)
            raise ValueError(
                f"temperature is {self.temperature:g}, but {key} returns log-probabilities at temperature 1 only: set "
                f"temperature: 1.0, or engine: {others}"
            )
        via = self.transfer.via
        needed = "nccl" if via == "gloo" else via  # both are broadcasts
        if needed in ("cuda_ipc", "nccl") and needed not in capabilities.gpu_transports:
            others = name_alternatives(lambda known: needed in known.gpu_transports)
            raise ValueError(f"transfer.via is {via}, which {key} does not support: set auto, or engine: {others}")
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> "RolloutConfig":
        if self.router_replay and not self.capabilities.returns_routes:
            others = name_alternatives(lambda known: known.returns_routes)
            raise ValueError(
                f"router_replay is true, but engine {self.engine} does not return the experts that it has chosen: set "
                f"it to false, or set engine: {others}"
            )
        return self

    @model_validator(mode="after")
    def _check_turn_cache(self) -> "RolloutConfig":
        if not self.keep_turn_cache and not self.capabilities.keeps_turn_cache:
            others = name_alternatives(lambda known: known.keeps_turn_cache)
            raise ValueError(
                f"keep_turn_cache is false, but engine {self.engine} does not have this setting: remove it, or set "
                f"engine: {others}"
            )
        return self

    @property
    def num_seqs(self) -> int:
        """Maximum number of sequences that one rank decodes concurrently."""
        return DEFAULT_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine."""
        return get_capabilities(self.engine)

    @property
    def needs_own_process(self) -> bool:
        return self.capabilities.own_process

    @property
    def can_share_weights(self) -> bool:
        """Whether the rollout can use the actor's weights instead of a copy if both run in one process."""
        return self.capabilities.shares_weights and self.quantization is None

    def can_sleep(self, *, on_gpus: bool) -> bool:
        """Returns whether the rollout frees its devices while other roles use them."""
        if not self.capabilities.sleep:
            return False
        sleep = None if self.vllm is None else self.vllm.sleep
        return on_gpus if sleep is None else sleep

    def in_one_process(self) -> "RolloutConfig":
        """Returns the settings for a CPU process with all roles: without quantization, and with the default engine if
        the engine needs its own process.
        """
        changes: dict[str, Any] = {"quantization": None}
        if self.capabilities.own_process:
            changes |= {"engine": DEFAULT_ENGINE, "vllm": None, "options": {}}
        return self.model_copy(update=changes)

    def name_setting(self, name: str) -> str | None:
        """Returns `GROUP.name` with the engine's own group of settings, or None if the engine has no group."""
        return None if self.capabilities.settings is None else f"{self.capabilities.settings}.{name}"

    @property
    def max_model_len(self) -> int | None:
        """Largest number of tokens of prompt plus response in the settings of the engine, or None if it is not set."""
        return None if self.vllm is None else self.vllm.max_model_len

    @property
    def sent_dtype(self) -> str | None:
        """Dtype to which weights are cast before they are sent. None keeps the dtype of the weights."""
        return None if self.vllm is None else self.vllm.dtype


def quantized_dtype_problem(role: str, config: RolloutConfig, dtype: str) -> str | None:
    """Returns the error message if the weights do not have the dtype that the quantization requires, or None."""
    supported = None if config.quantization is None else config.capabilities.quantizations[config.quantization].dtypes
    if supported is None or dtype in supported:
        return None
    setting = config.name_setting("dtype")
    fix = f"actor.model.dtype: {supported[0]}" if setting is None else f"{role}.{setting}: {supported[0]}"
    return (
        f"{role}.quantization is {config.quantization}, which engine {config.engine} computes in "
        f"{' or '.join(supported)}, but the weights are {dtype}: set {fix}"
    )


def quantized_device_problem(role: str, config: RolloutConfig, device: str) -> str | None:
    """Returns the error message if a kind of devices does not support the rollout's quantization, or None."""
    if config.quantization is None:
        return None
    known = config.capabilities.quantizations
    if device in known[config.quantization].devices:
        return None
    others = " or ".join(name for name, each in known.items() if device in each.devices) or "null"
    return (
        f"{role}.quantization is {config.quantization}, which engine {config.engine} supports on "
        f"{' and '.join(known[config.quantization].devices)} only, but placement.device is {device}: set "
        f"{role}.quantization: {others}"
    )


ModelRoleConfig = TrainedConfig | ReferenceConfig | ScoringModelConfig
"""Settings of a role that has a model, or can have one."""


def roles_of(config: Config) -> dict[str, RoleConfig]:
    """Returns role -> settings, for all roles of a run's config."""
    fields = ((name, value) for name, value in config if isinstance(value, RoleConfig))
    return {role: settings for name, value in fields for role, settings in value.roles(name).items()}


def keys_of(config: Config) -> dict[str, str]:
    """Returns role -> key of the role's settings in a run's config."""
    fields = ((name, value) for name, value in config if isinstance(value, RoleConfig))
    return {role: key for name, value in fields for role, key in value.role_keys(name).items()}


def models_of(config: Config) -> dict[str, ModelRoleConfig]:
    """Returns role -> settings, for all roles that can have a model."""
    return {role: value for role, value in roles_of(config).items() if isinstance(value, ModelRoleConfig)}


def find_tokenizer_role(config: Config) -> str | None:
    """Returns the role whose tokenizer encodes the data: the actor if it exists, otherwise the first trained role."""
    trained = [name for name, value in config if isinstance(value, TrainedConfig)]
    return "actor" if "actor" in models_of(config) else next(iter(trained), None)
