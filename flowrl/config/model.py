"""Settings of models, adapters, optimizers and training engines."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Config, Dependency, DeviceKind, FilePath, OptionValues, check_name
from flowrl.config.engines.train_engines import (
    DEFAULT_TRAIN_ENGINE,
    TrainCapabilities,
    TrainEngineName,
    get_train_capabilities,
)
from flowrl.config.source import read_json

ADAPTER_SETTINGS = "adapter_config.json"
"""File of peft in the folder of an adapter. It names the base model."""

ModelKind = Literal["policy", "critic", "reward_model"]
"""A causal language model, or a model with a value head or a score head."""


class ModelConfig(Config):
    """The initial model of a role."""

    path: FilePath
    """Local directory written by `save_pretrained`, or a Hub name. A directory with a LoRA adapter in the format of
    peft sets `adapter`; `path` is then its base model."""

    adapter: FilePath | None = None
    """Directory of a saved LoRA adapter for the model at `path`. Its changes are merged into the weights when they are
    loaded. A role with `lora` trains this adapter further."""

    tokenizer: FilePath | None = None
    """Folder of the tokenizer and its chat template. Null uses that of the adapter, if it has one, or the model's
    folder. It is saved with the model."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the weights in memory. bfloat16 halves the memory, but rounds small updates to zero. float64 is for
    numeric comparisons on the CPU. Results then hardly depend on the summation order. vLLM does not support float64.
    """

    dropout: Literal[0] | None = None
    """0 disables the dropout in the model's config, which GPT-2 and OPT have. Null rejects a model with dropout."""

    strict: bool = True
    """Reject a model whose files lack weights or have unexpected ones. False ignores unexpected weights, and
    initializes missing ones as transformers does, with the same values on all ranks. The run reports their names.
    Judges and reward models with a trained head reject missing weights anyway, and vLLM supports only true."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_adapter(cls, settings: Any) -> Any:  # Any: values of the YAML file
        """Replaces the path of an adapter by that of its base model."""
        if not isinstance(settings, Mapping) or not isinstance(settings.get("path"), str | Path):
            return settings
        folder = Path(settings["path"])
        if (folder / "config.json").is_file() or not (folder / ADAPTER_SETTINGS).is_file():
            return settings
        if settings.get("adapter") is not None:
            raise ValueError(
                f"path is {folder}, which is an adapter, but adapter is set, too: set path to the base model, or "
                f"remove adapter"
            )
        return {**settings, "path": read_base_model(folder), "adapter": folder}

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer."""
        if self.tokenizer is not None:
            return self.tokenizer
        has_own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.adapter if has_own and self.adapter is not None else self.path

    @property
    def base(self) -> "ModelConfig":
        """The same model without the adapter."""
        return self if self.adapter is None else self.model_copy(update={"adapter": None})


def read_base_model(adapter: Path) -> str:
    """Returns the base model that an adapter folder names. Raises ValueError if it names none."""
    file = adapter / ADAPTER_SETTINGS
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): pass the base model, and {adapter} as its adapter"
        ) from error
    base = settings.get("base_model_name_or_path") if isinstance(settings, Mapping) else None
    if not isinstance(base, str) or not base:
        raise ValueError(f"{file} names no base model: pass the base model, and {adapter} as its adapter")
    return base


class ExportConfig(Config):
    """Files of the trained model that a run saves in `model/`. `flowrl export` has the same settings as options."""

    max_shard_gb: PositiveFloat = 5.0
    """Maximum size of a safetensors file in GB (10^9 bytes). A larger weight has a file of its own."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Dtype of the exported weights. Null keeps the dtype of the trained weights."""


BaseQuantization = Literal["nf4", "int8"]
"""Quantization of the frozen weights under an adapter."""

EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out"})
"""Names of the modules with the embeddings and of the head in transformers' language models."""


class LoraConfig(Config):
    """LoRA adapter: two low-rank matrices per target layer are trained, and the layer's own weights are frozen."""

    rank: PositiveInt
    """Rank of the adapter; usually 8 to 64."""

    alpha: PositiveFloat = 32.0
    """Scale. The product of the matrices is multiplied by alpha / rank, and with `rslora` by alpha / sqrt(rank)."""

    rslora: bool = False
    """Rank-stabilized scale, alpha / sqrt(rank), so that gradients do not shrink with the rank (arXiv 2312.03732)."""

    targets: Literal["all_linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all_linear"
    """Target layers: all linear layers except the head (in a mixture of experts only those of attention), or a list of
    names such as [q_proj, v_proj]."""

    modules_to_save: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules of which all weights are trained, such as [embed_tokens, lm_head] for tokens that the model has not
    learned. They are saved with the adapter. Tied weights are trained together."""

    base_quantization: BaseQuantization | None = None
    """Quantization of the frozen weights of the target layers (QLoRA): 4-bit `nf4` or `int8`, with torchao. Weight
    syncs and exports merge the adapter into the dequantized weights. Not for sharded models and pipeline stages."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, settings: Any) -> Any:  # Any: values of the YAML file
        if isinstance(settings, Mapping) and "dropout" in settings:
            raise ValueError(
                "dropout is not supported, because the trained policy must be the one that sampled: remove it"
            )
        return settings

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        if self.targets != "all_linear" and (not all(self.targets) or len(set(self.targets)) < len(self.targets)):
            raise ValueError(f"targets are {list(self.targets)}: name each layer once, or set targets: all_linear")
        if not all(self.modules_to_save) or len(set(self.modules_to_save)) < len(self.modules_to_save):
            raise ValueError(f"modules_to_save is {list(self.modules_to_save)}: name each module once")
        return self


class WeightGroupConfig(Config):
    """A group of weights with its own learning rate or weight decay."""

    weights: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Patterns of weight names, such as [value_head.*]; `*` matches any text. For a policy, the
    names are those of its causal language model, such as `model.layers.0.mlp.up_proj.weight`; for a critic
    `value_head.*` and `backbone.layers.0...`; for a reward model `model.model.layers.0...` and `model.score.weight`."""

    lr: PositiveFloat | None = None
    """Peak learning rate. It follows the schedule of the optimizer. Null uses that of the optimizer."""

    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay, also of weights in `no_decay`. Null uses that of the optimizer."""

    @model_validator(mode="after")
    def _check(self) -> "WeightGroupConfig":
        if self.lr is None and self.weight_decay is None:
            raise ValueError("the group has neither lr nor weight_decay: set one of them, or remove the group")
        return self


OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
"""Names of the included optimizers. `flowrl.engines.train.optimizers` builds them."""


class OptimizerConfig(Config):
    """The optimizer, its learning rate schedule, and gradient clipping."""

    DEPENDENCIES = (
        Dependency(
            ("momentum",),
            lambda optimizer: optimizer.kind == "muon",
            "only Muon has it: set kind: muon, or remove momentum",
        ),
        Dependency(
            ("min_lr",),
            lambda optimizer: optimizer.schedule != "constant",
            "schedule is constant, which does not decay: set schedule to linear or cosine, or remove min_lr",
        ),
    )

    kind: Annotated[str, AfterValidator(partial(check_name, what="optimizer", names=OPTIMIZERS))] = "adamw"
    """`adamw`; `adamw_8bit`, with 8-bit moments (torchao); `muon`, which orthogonalizes the updates of the matrices
    in the layers, with AdamW for all other weights; or a user function `(parameter groups, settings) ->
    torch.optim.Optimizer`."""

    options: OptionValues = Field(default_factory=dict)
    """Settings of a user's optimizer, which its function reads from `settings.options`."""

    lr: PositiveFloat
    """Peak learning rate."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a linear or cosine schedule, and after it. The rate of a weight group ends at the
    same fraction of its peak."""

    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of Adam's first and second moments, each in [0, 1)."""

    eps: PositiveFloat = 1e-8
    """Adam epsilon, added to the denominator for numerical stability."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay. It is multiplied by the learning rate."""

    no_decay: Annotated[tuple[Literal["norms", "biases", "embeddings"], ...], Field(strict=False)] = ("norms", "biases")
    """Weights without decay. `embeddings` includes a head that shares their weights."""

    groups: Mapping[str, WeightGroupConfig] = Field(default_factory=dict)
    """Groups of weights with their own learning rate or weight decay. The key is GROUP in the metric `ROLE/lr/GROUP`.
    The first group with a matching pattern applies.
    """

    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warmup from 0 to `lr`."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warmup: constant, or decay to `min_lr` at `total_steps`."""

    total_steps: PositiveInt | None = None
    """Optimizer step at which a linear or cosine schedule ends. Null uses the number of updates of the run (steps
    times minibatches times epochs, or steps in SFT), but at least `warmup_steps` + 1. A constant schedule ignores it.
    """

    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum L2 norm of the gradient over all weights; null disables gradient clipping."""

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if self.options and self.kind in OPTIMIZERS:
            raise ValueError(
                f"options has {', '.join(self.options)}, but {self.kind} has no options: remove it, or set kind to a "
                f"user function"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}, but each must be at least 0 and below 1")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, but must be below total_steps, {self.total_steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr:g}, but must be at most lr, {self.lr:g}")
        for name in self.groups:
            if re.fullmatch(r"\w+", name) is None:
                raise ValueError(
                    f"groups has the name {name!r}, which becomes a part of a metric: use only letters, digits and "
                    f"underscores"
                )
        return self

    def with_end(self, num_updates: int) -> "OptimizerConfig":
        """Returns the settings with `num_updates` instead of a null `total_steps`. A constant schedule keeps null.

        In a run that ends during the warmup, the schedule ends one update after the warmup.
        """
        if self.schedule == "constant" or self.total_steps is not None:
            return self
        return self.model_copy(update={"total_steps": max(num_updates, self.warmup_steps + 1)})


REPLICATED = ("single", "ddp", "zero1")
"""Strategies in which each rank has the full model."""


class EngineConfig(Config):
    """Execution of a model: parallelism, memory and kernels. These settings change results only by rounding."""

    DEPENDENCIES = (
        Dependency(
            ("offload_activations",),
            lambda engine: engine.gradient_checkpointing,
            "gradient_checkpointing is false: set it to true, or remove offload_activations",
        ),
    )

    kind: TrainEngineName = DEFAULT_TRAIN_ENGINE
    """Training engine: `fsdp`, or a user's class (docs/extend.md). `fsdp` also runs unsharded models."""

    options: OptionValues = Field(default_factory=dict)
    """Settings of a user's engine, which it reads from `context.config.engine.options`."""

    strategy: Literal["auto", "single", "ddp", "zero1", "fsdp"] = "auto"
    """Data parallelism. `single`: one process. `ddp`: one replica per rank. `zero1`: as ddp, but each rank has the
    optimizer state of a part of the weights. `fsdp`: weights, gradients and optimizer state are sharded over the ranks;
    FSDP2 also runs on one rank. `auto`: fsdp if the placement has tp; otherwise
    single for one rank, and ddp for several. `backend: inline` runs every model without FSDP2."""

    shard_ranks: PositiveInt | None = None
    """Number of data-parallel ranks that share one sharded copy of the model (HSDP). Null uses the ranks of a node if
    each node has the same number, and otherwise all ranks. Only for fsdp.
    """

    reshard_after_forward: bool = True
    """Reshard weights after the forward pass. False needs more memory and less communication. Only for fsdp."""

    expert_parallel: bool = False
    """Divide the experts of a mixture of experts over the ranks of a sharded copy, which then exchange tokens instead
    of the weights of experts. The number of these ranks must divide the number of experts. Only for fsdp.
    """

    offload: Literal["none", "optimizer", "parameters", "idle", "auto"] = "none"
    """CPU offload on GPUs. `optimizer`: optimizer state between steps. `parameters`: weights and optimizer state except
    for the running layer (fsdp); one GPU waits for each copy. `idle`: all state while another role uses the
    device. `auto`: the first of none, optimizer and, for fsdp, parameters with which the plan fits the memory."""

    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of matrix products. Null: bfloat16 for float32 weights on GPUs, and otherwise the dtype of the weights.
    float16 uses loss scaling.
    """

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This needs less memory and about a third more time."""

    offload_activations: bool = False
    """With gradient_checkpointing: keep the saved inputs of layers in host memory until the backward pass. This needs
    less GPU memory for long sequences. Only for GPUs.
    """

    sequence_parallel_norms: bool = False
    """With tp: shard norms, residuals and the head over the sequence. This saves memory for long sequences."""

    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernels: torch SDPA, or flash-attn on GPUs in half precision. `auto` uses flash-attn if possible."""

    compile: bool | Literal["auto"] = "auto"
    """Compile the layers, and the head of a language model, with torch.compile. Steps are faster, except for the first,
    which takes 20 seconds longer for 1.5B on an H200, and more with LoRA. `auto` compiles on GPUs, except with fsdp,
    tp, sp, pp or `lora.base_quantization`, for mixtures of experts, with `deterministic: true`, and on hosts without a
    C compiler or Python's headers."""

    overlap_all_reduce: bool | Literal["auto"] = False
    """With ddp and zero1: all-reduce the gradients in buckets during the last backward pass of `update`, instead of
    once after it. `auto` does so on GPUs.
    """

    packing: Literal["auto", "always", "never"] = "auto"
    """Sequence packing. `auto` packs if the model supports it, except in float32 on GPUs. Without packing, sequences of
    similar length are padded.
    """

    max_tokens_per_microbatch: PositiveInt = 16384
    """Maximum tokens per rank and forward pass, including padding. A longer sequence forms its own micro-batch."""

    def sharding_settings(self) -> dict[str, Any]:
        """Returns the settings that have an effect only on sharded models, by name."""
        settings = {
            "shard_ranks": (self.shard_ranks, self.shard_ranks is not None),
            "reshard_after_forward": (self.reshard_after_forward, not self.reshard_after_forward),
            "expert_parallel": (self.expert_parallel, self.expert_parallel),
            "offload": (self.offload, self.offload == "parameters"),
        }
        return {name: value for name, (value, is_set) in settings.items() if is_set}

    @property
    def capabilities(self) -> TrainCapabilities:
        """Capabilities of the engine."""
        return get_train_capabilities(self.kind)

    def check_role(
        self, outputs: Sequence[str], *, has_adapter: bool = False, model: ModelConfig | None = None, name: str = ""
    ) -> None:
        """Raises ValueError if the engine lacks an output that a role needs, or does not support its adapter.

        `name` is the name of the role, if the error has no location.
        """
        key = f"{name}.engine.kind" if name else "engine.kind"
        known, fix = self.capabilities, f"set {key}: {DEFAULT_TRAIN_ENGINE}"
        if missing := list(dict.fromkeys(output for output in outputs if output not in known.outputs)):
            raise ValueError(
                f"{key} {self.kind} does not compute {' and '.join(missing)}, which {name or 'this role'} needs (it "
                f"computes {', '.join(known.outputs)}): {fix}"
            )
        if has_adapter and not known.adapters:
            raise ValueError(f"lora is set, but engine.kind {self.kind} trains no adapters: remove lora, or {fix}")
        if model is not None and model.adapter is not None and not known.adapters:
            raise ValueError(
                f"model.adapter is {model.adapter}, but engine.kind {self.kind} reads no adapters: merge it into its "
                f"model, or {fix}"
            )

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        known = self.capabilities
        for option in self.options:
            if option not in known.options:
                available = ", ".join(known.options) or "none"
                raise ValueError(f"options has {option}, which kind {self.kind} does not have; available: {available}")
        for name, field in type(self).model_fields.items():
            if name not in ("kind", "options", *known.settings) and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but kind {self.kind} does not read it: remove it, or set kind: "
                    f"{DEFAULT_TRAIN_ENGINE}"
                )
        if self.strategy in REPLICATED:
            for name, value in self.sharding_settings().items():
                raise ValueError(
                    f"{name} is {str(value).lower()}, but strategy is {self.strategy}: remove it, or set strategy: fsdp"
                )
        if self.expert_parallel and self.offload in ("parameters", "auto"):
            raise ValueError(
                f"offload is {self.offload}, but expert_parallel is true, and FSDP2 does not move the weights of "
                f"experts: set offload: optimizer, or remove expert_parallel"
            )
        if self.strategy in ("single", "fsdp") and self.overlap_all_reduce is True:
            raise ValueError(
                f"overlap_all_reduce is true, but strategy is {self.strategy}, and only ddp and zero1 support it: "
                f"remove overlap_all_reduce, or set strategy: ddp"
            )
        return self


def default_compute_dtype(model: ModelConfig, device: DeviceKind) -> Literal["bfloat16"] | None:
    """Returns the value of a null `compute_dtype`. None stands for the dtype of the weights."""
    return "bfloat16" if device == "cuda" and model.dtype == "float32" else None


def compiles(engine: EngineConfig, *, on_gpu: bool, is_parallel: bool, is_deterministic: bool) -> bool:
    """Returns whether the layers of a dense model are compiled, if the host has a compiler.

    `auto` compiles on GPUs, except in deterministic mode, because torch selects kernels by measured time. `is_parallel`
    excludes layers that have not run compiled on a GPU: with collectives (FSDP2, `tp`, `sp`), of pipeline stages, or
    with quantized weights. The engine excludes mixtures of experts.
    """
    if engine.compile == "auto":
        return on_gpu and not is_parallel and not is_deterministic
    return engine.compile


def shards_model(engine: EngineConfig, tp: int) -> bool:
    """Returns whether FSDP2 shards the model over the ranks of its role, possibly one rank."""
    return engine.strategy == "fsdp" or tp > 1
