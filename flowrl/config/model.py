"""What a model is, how it is optimised, and how much of a batch it sees at once."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Config, FilePath


class ModelConfig(Config):
    """The weights a role starts from."""

    path: FilePath
    """Folder written by `save_pretrained` (weights, config, tokenizer), or a hub name."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory; bfloat16 halves the memory and rounds updates."""

    dropout: Literal[0] | None = None
    """0 overrides the dropout probabilities of the model's configuration, for models published with dropout (GPT-2,
    OPT). Without it such a model is rejected."""


class LoraConfig(Config):
    """An adapter: two small matrices beside each chosen layer, which are trained in place of its weights."""

    rank: PositiveInt
    """Rows of the one matrix and columns of the other; 8 to 64 are usual, and the more the more can be learned."""

    alpha: PositiveFloat = 32.0
    """What the matrices' product is multiplied by is alpha / rank."""

    targets: Literal["all_linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all_linear"
    """Layers that get one: every linear layer but the head, or those of these names, such as [q_proj, v_proj]."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, settings: Any) -> Any:  # Any: what the file says
        if isinstance(settings, Mapping) and "dropout" in settings:
            raise ValueError(
                "dropout is not supported, because the policy that is trained must be the one that sampled: remove it"
            )
        return settings

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        if self.targets == "all_linear":
            return self
        twice = sorted({name for name in self.targets if self.targets.count(name) > 1})
        if twice or not all(self.targets):
            what = f"name {twice[0]} twice" if twice else "have an empty name"
            raise ValueError(f"targets {what}: name each layer once, or set targets: all_linear")
        return self


class OptimizerConfig(Config):
    """AdamW, its learning rate over time, and gradient clipping."""

    lr: PositiveFloat
    """Peak learning rate."""

    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """Decay of Adam's running mean and running square, each in [0, 1)."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the running square, so that a small one does not give a large step."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay per unit of learning rate."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0 to `lr`."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warmup: unchanged, or falling to 0 at `total_steps`."""

    total_steps: PositiveInt | None = None
    """Optimizer steps after which a linear or cosine schedule has reached 0; unused by a constant one."""

    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient is scaled down to this global norm; null turns clipping off."""

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}, but each must be at least 0 and below 1")
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule} needs an end: set total_steps, or schedule: constant")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, but must be below total_steps, which is {self.total_steps}"
            )
        return self


class EngineConfig(Config):
    """How a model runs over its share of a batch. Changes time and memory, never the numbers, which other dtypes
    round."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """`single`: one process; `ddp`: a copy of the model per rank, gradients summed; `fsdp`: each rank holds a part of
    weights, gradients and optimizer state; `auto`: by the number of ranks, fsdp where the role's placement has tp."""

    shard_ranks: PositiveInt | None = None
    """fsdp: data-parallel ranks that hold one copy between them, such as those of a node; null is all of them."""

    reshard_after_forward: bool = True
    """fsdp: put a layer's weights together anew for the backward pass. False keeps them: more memory, less traffic."""

    offload: Literal["none", "optimizer", "parameters", "idle"] = "none"
    """What lies in the CPU's memory: `optimizer`, Adam's state between steps; `parameters`, with fsdp, weights and
    state but for the layer that runs; `idle`, all of it while another role of the same device runs. For GPUs."""

    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of matrix products, over weights in the model's dtype; null is that dtype. float16 scales the loss."""

    gradient_checkpointing: bool = False
    """Keep each layer's input only, and run the layer again in the backward pass: a third more time, less memory."""

    sequence_parallel_norms: bool = False
    """With tp: each rank computes and keeps norms, residuals and the head for a stretch of the row instead of all of
    it. Less memory for long rows; perhaps some more time."""

    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernels: torch's own, or flash-attn's, which needs a GPU and half precision. `auto` takes the latter
    where it can."""

    compile: bool = False
    """Compile each layer with torch.compile; pays off on GPUs after the first steps."""

    packing: Literal["auto", "always", "never"] = "auto"
    """Run rows one after another without padding: `auto` where the model can (docs/models.md), others in padded rows of
    similar length."""

    max_tokens_per_microbatch: PositiveInt = 16384
    """Tokens per rank of one forward pass, padding included where there is some; a longer row stands alone. Lower it
    when memory runs out."""

    def for_cut_models(self) -> dict[str, Any]:
        """The settings, by name, that do nothing unless ranks hold parts of the model."""
        asked = {
            "shard_ranks": (self.shard_ranks, self.shard_ranks is not None),
            "reshard_after_forward": (self.reshard_after_forward, not self.reshard_after_forward),
            "offload": (self.offload, self.offload == "parameters"),
        }
        return {name: value for name, (value, is_asked) in asked.items() if is_asked}

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.strategy in ("single", "ddp"):
            for name, value in self.for_cut_models().items():
                raise ValueError(
                    f"{name} is {value}, which is for strategy fsdp and not {self.strategy}: "
                    f"remove it, or set strategy: fsdp"
                )
        return self


def shards_model(engine: EngineConfig, num_ranks: int, tp: int) -> bool:
    """Whether each of a role's `num_ranks` processes, tensor-parallel ones included, holds a part of its model."""
    return num_ranks > 1 and (engine.strategy == "fsdp" or tp > 1)
