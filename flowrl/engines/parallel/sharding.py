"""Shards a model over ranks with torch's tensor parallelism and FSDP2, and selects its attention implementation.

Tensor parallelism follows the plan that transformers defines for the model, or that of `tp_plans`, except for routed
experts. FSDP2 (`fully_shard`) wraps each layer and the model. Gradients are summed over ranks. FSDP2 would average them
by default.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_flash_attn_2_available

from flowrl.config import EngineConfig, UserError
from flowrl.engines.models.adapters.lora import tp_replicated_layers, tp_sharded_layers
from flowrl.engines.models.attention import FLASH, ROWS, has_grouped_kernel, packing_obstacle
from flowrl.engines.models.loading import has_attention_softcap
from flowrl.engines.models.routing import mixture_of
from flowrl.engines.models.sequence_sharding import SequenceShardable, SequenceSharding
from flowrl.engines.parallel.expert_parallel import shard_experts
from flowrl.engines.parallel.rank_mesh import RankMesh
from flowrl.engines.parallel.sequence_parallel_norms import SEQUENCE, replicate_inputs, shard_adapter, shard_norms
from flowrl.engines.parallel.tp_plans import TensorParallelPlan, copy_outputs, divide_heads, find_plan, for_conv1d

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Plain sharding would mix the halves of a fused matrix, so the product is gathered between the layers.
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm per head [B, L, H, E]: weights are replicated and heads are sharded.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Maps transformers' name of a parallel style to torch's class."""

_SEQUENCE_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    **_STYLES,
    "rowwise": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
}
"""Variant of `_STYLES` for hidden states that are sharded by sequence between the matrices."""


class EngineError(UserError):
    """Raised if a model does not support its placement or its engine settings."""


def shard_model(model: nn.Module, mesh: RankMesh, config: EngineConfig, compute_dtype: torch.dtype | None) -> None:
    """Shards a model over the ranks of a mesh, in place. Before the call, the model must be identical on every rank.

    Activations and gathered weights have `compute_dtype`. If it is None, they have the dtype of the weights. Raises
    EngineError if the model has no tensor-parallel plan, or if tp does not divide a size of the model.
    """
    assert mesh.devices is not None, "a single process does not shard"
    if mesh.tp > 1:
        for language_model in language_models(model):
            _apply_tensor_parallelism(language_model, mesh, shards_norms=config.sequence_parallel_norms)
    is_half = any(weight.dtype.itemsize == 2 for weight in model.parameters())
    reduce_dtype = torch.float32 if compute_dtype is not None or is_half else None
    pinned = mesh.devices.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if config.offload == "parameters" else OffloadPolicy()
    # With a dimension of one rank, each layer would still all-reduce its gradients.
    sharded = mesh.devices["replicate", "shard"] if mesh.devices["replicate"].size() > 1 else mesh.devices["shard"]
    experts = set[nn.Parameter]()
    if config.expert_parallel:
        assert mesh.experts is not None, "the mesh is created with expert_parallel"
        for language_model in language_models(model):
            experts |= shard_experts(language_model, sharded, mesh.experts)
    for unit in [*layers(model), model]:
        fully_shard(
            unit,
            mesh=sharded,
            ignored_params=experts,
            reshard_after_forward=config.reshard_after_forward and unit is not model,
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            offload_policy=offload,
        )
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if sharded.size() > 1:  # one rank needs no factor, and would divide a copy of the gradients
                unit.set_gradient_divide_factor(1)
            # gloo has no reduction with a divide factor.
            unit.set_force_sum_reduction_for_comms(True)


def make_sequence_sharding(config: EngineConfig, mesh: RankMesh) -> SequenceSharding | None:
    """Returns the ranks that share each row, or None. Raises EngineError if sequence_parallel_norms is set without
    tp.
    """
    if config.sequence_parallel_norms and mesh.tp == 1:
        raise EngineError(
            "engine.sequence_parallel_norms needs tensor parallelism, but this role has tp 1: set it to false, or set "
            "tp for the role"
        )
    if not config.sequence_parallel_norms:
        return None if mesh.sequence is None else SequenceSharding(mesh.sequence, None)
    assert mesh.devices is not None and mesh.same_rows is not None, "tp > 1 has several ranks"
    return SequenceSharding(mesh.same_rows, mesh.devices.get_group("tp"))


def check_weight_dtype(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Raises EngineError if autocast does not support `compute_dtype` for the dtype of the weights.

    Autocast casts float32 weights to half precision. It does not cast half-precision weights to float32, and never
    casts float64 weights.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if compute_dtype is not None and torch.float64 in dtypes:
        name = str(compute_dtype).removeprefix("torch.")
        raise EngineError(
            f"engine.compute_dtype is {name}, but the model's weights are float64: leave engine.compute_dtype out"
        )
    if compute_dtype == torch.float32 and dtypes & {torch.bfloat16, torch.float16}:
        raise EngineError(
            "engine.compute_dtype is float32, but the model's weights have half precision: set "
            "model.dtype: float32, or leave engine.compute_dtype out"
        )


def reshard_weights(model: nn.Module) -> None:
    """Frees full weights. FSDP2 keeps them after a forward pass without a backward pass."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def choose_attention(
    model: PreTrainedModel, config: EngineConfig, device: torch.device, dtype: torch.dtype, *, without_masks: bool
) -> None:
    """Selects a model's attention implementation.

    Args:
        model: a transformers model.
        config: engine settings with the requested attention.
        device: device of the model.
        dtype: dtype of queries, keys and values.
        without_masks: True uses flowrl's attention, which needs no attention masks, unless flash-attn is selected.
    Raises EngineError if the requested attention does not support the device, the dtype or the model.
    """
    requested = config.attention
    supports_flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested == FLASH and not supports_flash:
        raise EngineError(
            f"engine.attention is flash_attention_2, which needs a GPU and bfloat16 or float16, but the model is "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: set attention: auto"
        )
    if requested == "sdpa" and has_attention_softcap(model):
        raise EngineError(
            f"engine.attention is sdpa, which ignores the attention softcap of {type(model).__name__}: set "
            f"attention: auto"
        )
    if requested == FLASH or (requested == "auto" and supports_flash and is_flash_attn_2_available()):
        model.set_attn_implementation(FLASH)
    elif without_masks:
        model.set_attn_implementation(ROWS)


def can_pack_rows(model: nn.Module, config: EngineConfig, device_type: str, dtype: torch.dtype) -> bool:
    """Returns whether an engine that computes in `dtype` packs rows.

    `packing: auto` does not pack in float32 on a GPU, where each packed row would need its own kernels in each layer.
    Raises EngineError for `packing: always` if the model does not support packing.
    """
    if config.packing == "never" or (config.packing == "auto" and not has_grouped_kernel(device_type, dtype)):
        return False
    obstacles = [
        f"{type(part).__name__} has {obstacle}"
        for part in language_models(model)
        if (obstacle := packing_obstacle(part)) is not None
    ]
    if not isinstance(model, SequenceShardable):
        obstacles.append(f"{type(model).__name__} is not a SequenceShardable")
    if obstacles and config.packing == "always":
        raise EngineError(f"engine.packing is always, but {obstacles[0]}: set packing: auto")
    return not obstacles


def language_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields the outermost transformers models in a module. Models nested in them are not yielded."""
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from language_models(child)


def layers(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers of all language models in a module, in the order of their definition."""
    blocks = []
    for language_model in language_models(model):
        names = set(language_model._no_split_modules or ())
        # FSDP2 derives a class from that of each layer.
        blocks += [m for m in language_model.modules() if names & {cls.__name__ for cls in type(m).__mro__}]
    return blocks


def _apply_tensor_parallelism(model: PreTrainedModel, mesh: RankMesh, *, shards_norms: bool) -> None:
    """Shards the matrices in transformers' tensor-parallel plan, and with `shards_norms` also the norms. Replicates
    other modules.
    """
    name = type(model).__name__
    # Tensor parallelism replicates embeddings and heads; FSDP2 shards them over the other ranks.
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    replicated = {path for path, module in model.named_modules() if any(module is end for end in ends)}
    own = find_plan(model)
    known = (model.tp_plan or {}) if own is None else own.styles
    plan = {pattern: style for pattern, style in known.items() if pattern not in replicated}
    if mixture_of(model) is not None:
        # Each rank computes all routed experts of its tokens. FSDP2 or expert parallelism divides their weights.
        plan = {pattern: style for pattern, style in plan.items() if ".experts" not in pattern}
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown or not plan:
        reason = f"unknown style {', '.join(unknown)}" if unknown else "there is no tensor-parallel plan for it"
        raise EngineError(f"{name} does not support tp {mesh.tp}: {reason}; set tp: 1 and strategy: fsdp for this role")
    settings = model.config.get_text_config()
    _check_sizes(name, settings, mesh.tp)
    assert mesh.devices is not None
    frozen = [path for path, weight in model.named_parameters() if not weight.requires_grad]
    paths = [(path, style) for pattern, style in plan.items() for path in _matching_modules(pattern, model)]
    tp_mesh, styles = mesh.devices["tp"], _SEQUENCE_STYLES if shards_norms else _STYLES
    shared = [] if shards_norms else _modules_with_shared_inputs(model, dict(paths))
    for path, style in paths:
        by_outputs = style.startswith("colwise")
        has_distributed_inputs = shards_norms or (by_outputs and path.rpartition(".")[0] in shared)
        for layer in tp_sharded_layers(model, path, by_outputs=by_outputs):
            module = model.get_submodule(layer)
            chosen = styles[style]()
            parallelize_module(module, tp_mesh, for_conv1d(chosen) if isinstance(module, Conv1D) else chosen)
        for layer in tp_replicated_layers(model, path, by_outputs=by_outputs) if has_distributed_inputs else ():
            shard_adapter(model.get_submodule(layer), tp_mesh, by_outputs=by_outputs)
    if own is not None:
        _adapt_modules(model, own, settings.num_attention_heads, tp_mesh)
    if shards_norms:
        shard_norms(model, tp_mesh, [path for path, style in paths if style.startswith("rowwise")])
    for path in shared:
        replicate_inputs(model.get_submodule(path), tp_mesh, Replicate())
    for path in frozen:
        # torch's style for norms creates trainable weights, also for frozen norms.
        model.get_parameter(path).requires_grad_(False)


def _modules_with_shared_inputs(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    """Returns the names of the modules, such as attention and MLP, whose column-wise sharded matrices read the same
    hidden states. Without `replicate_inputs`, each of these matrices all-reduces the gradient of these states itself.

    `styles` maps the names of the sharded layers to their styles. The result lacks modules that also have matrices that
    are not sharded, because these may read the hidden states, too.
    """
    parents = Counter(path.rpartition(".")[0] for path, style in styles.items() if style.startswith("colwise"))
    return [
        parent
        for parent, count in parents.items()
        if count > 1
        and all(
            weight.ndim == 1 or f"{parent}.{name.partition('.')[0]}" in styles
            for name, weight in model.get_submodule(parent).named_parameters()
        )
    ]


def _adapt_modules(model: PreTrainedModel, plan: TensorParallelPlan, heads: int, tp_mesh: DeviceMesh) -> None:
    """Makes the modules of a model with `heads` heads work with the shards of a plan of `tp_plans`."""
    for path in _matching_modules(plan.attention, model):
        divide_heads(model.get_submodule(path), plan, heads, tp_mesh.get_local_rank(), tp_mesh.size())
    for path in _matching_modules(plan.copied, model):
        copy_outputs(model.get_submodule(path))


def _check_sizes(name: str, settings: PreTrainedConfig, tp: int) -> None:
    """Raises EngineError if tp does not divide a size of the model with this name and these settings."""
    for setting, count in (
        ("num_attention_heads", settings.num_attention_heads),
        ("num_key_value_heads", _num_key_value_heads(settings)),
        ("intermediate_size", 0 if _has_only_experts(settings) else getattr(settings, "intermediate_size", 0)),
    ):
        if count % tp:
            raise EngineError(f"{name} has {setting} {count}, which tp {tp} does not divide: set tp to a divisor")


def _has_only_experts(settings: PreTrainedConfig) -> bool:
    """Returns whether every MLP of a model belongs to an expert. `tp` does not divide experts."""
    is_qwen3 = settings.model_type == "qwen3_moe" and not settings.mlp_only_layers and settings.decoder_sparse_step == 1
    return is_qwen3 or settings.model_type == "mixtral"


def _num_key_value_heads(settings: PreTrainedConfig) -> int:
    """Returns the number of key-value heads, which Falcon's configuration names differently."""
    if settings.model_type == "falcon":
        is_grouped = settings.new_decoder_architecture or not settings.multi_query
        return settings.num_kv_heads if is_grouped else 1
    return getattr(settings, "num_key_value_heads", settings.num_attention_heads)


def _matching_modules(pattern: str, model: nn.Module) -> list[str]:
    """Returns the names of the modules that match a pattern of the plan. `*` matches one component of a name. An empty
    pattern matches none.
    """
    if not pattern:
        return []
    parts = pattern.split(".")
    paths = [path.split(".") for path, _ in model.named_modules()]
    return [".".join(p) for p in paths if len(p) == len(parts) and all(map(fnmatchcase, p, parts))]
