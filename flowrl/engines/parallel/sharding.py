"""Cutting a model over ranks: its layers' matrices over tensor-parallel peers, and all its weights over the rest.

The cuts are torch's own: tensor parallelism by transformers' plan of the model, FSDP2 (`fully_shard`) around each
layer and the whole. Gradients are made sums over ranks, which FSDP2 would make means.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from flowrl.config import EngineConfig, UserError
from flowrl.engines.models.attention import FLASH, ROWS, why_padded
from flowrl.engines.models.loading import caps_attention
from flowrl.engines.models.lora import cut_layers, uncut_layers
from flowrl.engines.models.sequence_sharding import SharesRows, Stretches
from flowrl.engines.parallel.rank_mesh import RankMesh
from flowrl.engines.parallel.split_norms import ROW, split_adapter, split_norms

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Two matrices in one, whose halves a plain cut would mix: the product is put together between the layers.
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm of each head [B, L, H, E]: peers have the same weights and see other heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Style of transformers -> torch's."""

_STYLES_OF_STRETCHES: Mapping[str, Callable[[], ParallelStyle]] = {
    **_STYLES,
    "rowwise": lambda: RowwiseParallel(output_layouts=ROW),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=ROW),
}
"""The same where peers hold stretches between layers' matrices."""


class EngineError(UserError):
    """A model cannot run as its placement or its engine asks."""


def shard_model(model: nn.Module, mesh: RankMesh, config: EngineConfig, compute_dtype: torch.dtype | None) -> None:
    """Cuts a model in place, so that each rank of the mesh holds its part of every weight.

    Args:
        model: the same on every rank.
        mesh: of several ranks.
        config: what happens to whole weights after a forward pass, and where parts lie.
        compute_dtype: of weights and activations in forward and backward passes; None is the weights' own.
    Raises:
        EngineError: tensor parallelism does not know or does not divide the model.
    """
    assert mesh.devices is not None, "a process that shares its model with no other cuts nothing"
    if mesh.tp > 1:
        for language_model in language_models(model):
            _cut_layers(language_model, mesh, splits_norms=config.sequence_parallel_norms)
    reduce_dtype = torch.float32 if compute_dtype is not None else None
    pinned = mesh.devices.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if config.offload == "parameters" else OffloadPolicy()
    for unit in [*layers(model), model]:
        fully_shard(
            unit,
            mesh=mesh.devices["replicate", "shard"],
            reshard_after_forward=config.reshard_after_forward and unit is not model,
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            offload_policy=offload,
        )
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1)
            # Without it the factor is an operation that gloo does not have.
            unit.set_force_sum_reduction_for_comms(True)


def shared_rows(config: EngineConfig, mesh: RankMesh) -> Stretches | None:
    """How ranks share rows; None where none do. Raises `EngineError` for norms that no peers can share."""
    if config.sequence_parallel_norms and mesh.tp == 1:
        raise EngineError(
            "engine.sequence_parallel_norms is true, which is for a role with tp, and this one has tp 1: set it to "
            "false, or tp for the role"
        )
    if not config.sequence_parallel_norms:
        return None if mesh.sequence is None else Stretches(mesh.sequence, None)
    assert mesh.devices is not None and mesh.peers is not None, "tp is of several ranks"
    return Stretches(mesh.peers, mesh.devices.get_group("tp"))


def refuse_lower_weights(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Raises `EngineError` for half-precision weights that should compute in float32, which autocast does not do."""
    found = {parameter.dtype for parameter in model.parameters()}
    if compute_dtype == torch.float32 and found & {torch.bfloat16, torch.float16}:
        raise EngineError(
            "engine.compute_dtype is float32, but the model's dtype is half precision, which holds no more: set "
            "model.dtype: float32, or leave engine.compute_dtype out"
        )


def drop_whole_weights(model: nn.Module) -> None:
    """Gives back what a forward pass has put together and kept for the backward pass that does not come."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def choose_attention(
    model: PreTrainedModel, config: EngineConfig, device: torch.device, dtype: torch.dtype, *, packs: bool
) -> None:
    """Sets a model's attention kernels; those for packed rows, if `packs`. Raises `EngineError` where those that were
    asked for cannot run."""
    wanted = config.attention
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted == FLASH and not fits:
        raise EngineError(
            f"engine.attention is flash_attention_2, which needs a GPU and bfloat16 or float16, and the model is in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: set attention: auto"
        )
    if wanted == "sdpa" and caps_attention(model):
        raise EngineError(
            f"engine.attention is sdpa, which leaves out the cap on attention's logits that {type(model).__name__} "
            f"has: set attention: auto"
        )
    if wanted == FLASH or (wanted == "auto" and fits and is_flash_attn_2_available()):
        model.set_attn_implementation(FLASH)
    elif packs:
        model.set_attn_implementation(ROWS)


def packs_rows(model: nn.Module, config: EngineConfig) -> bool:
    """Whether a model runs packed rows. Raises `EngineError` where it was asked to and cannot."""
    if config.packing == "never":
        return False
    reasons = [f"{type(part).__name__} has {why}" for part in language_models(model) if (why := why_padded(part))]
    if not isinstance(model, SharesRows):
        reasons.append(f"{type(model).__name__} does not run its backbone by flowrl.engines.models.sequence_sharding")
    if reasons and config.packing == "always":
        raise EngineError(f"engine.packing is always, but {reasons[0]}, so its rows are padded: set packing: auto")
    return not reasons


def language_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The outermost models of transformers in a module."""
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from language_models(child)


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the language models in a module; none where transformers names none."""
    found = []
    for language_model in language_models(model):
        names = set(language_model._no_split_modules or ())
        found += [module for module in language_model.modules() if type(module).__name__ in names]
    return found


def _cut_layers(model: PreTrainedModel, mesh: RankMesh, *, splits_norms: bool) -> None:
    """Tensor parallelism of the layers' matrices. What is not in the plan is computed alike by all peers, or norms by
    each for a stretch."""
    name = type(model).__name__
    # Embeddings and heads stay whole on each tensor-parallel rank: fsdp cuts them over the others.
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    uncut = {path for path, module in model.named_modules() if any(module is end for end in ends)}
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if pattern not in uncut}
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown or not plan:
        why = f"it asks for {', '.join(unknown)}" if unknown else "transformers has no tensor-parallel plan for it"
        raise EngineError(f"{name} cannot run with tp {mesh.tp}: {why}; set tp: 1 and strategy: fsdp for this role")
    settings = model.config.get_text_config()
    for what, count in (
        ("num_attention_heads", settings.num_attention_heads),
        ("num_key_value_heads", getattr(settings, "num_key_value_heads", settings.num_attention_heads)),
        ("intermediate_size", getattr(settings, "intermediate_size", 0)),
    ):
        if count % mesh.tp:
            raise EngineError(f"{name} has {what} {count}, which tp {mesh.tp} does not divide: set tp to a divisor")
    assert mesh.devices is not None
    frozen = [path for path, weight in model.named_parameters() if not weight.requires_grad]
    paths = [(path, style) for pattern, style in plan.items() for path in _named_by(pattern, model)]
    peers, styles = mesh.devices["tp"], _STYLES_OF_STRETCHES if splits_norms else _STYLES
    for path, style in paths:
        by_outputs = style.startswith("colwise")
        for layer in cut_layers(model, path, by_outputs=by_outputs):
            parallelize_module(model.get_submodule(layer), peers, styles[style]())
        for layer in uncut_layers(model, path, by_outputs=by_outputs) if splits_norms else ():
            split_adapter(model.get_submodule(layer), peers, by_outputs=by_outputs)
    if splits_norms:
        split_norms(model, peers, [path for path, style in paths if style.startswith("rowwise")])
    for path in frozen:
        # torch's style for norms gives them weights that are trained.
        model.get_parameter(path).requires_grad_(False)


def _named_by(pattern: str, model: nn.Module) -> list[str]:
    """The modules that a pattern of a plan names; `*` is one part of a path."""
    parts = pattern.split(".")
    paths = [path.split(".") for path, _ in model.named_modules()]
    return [".".join(p) for p in paths if len(p) == len(parts) and all(map(fnmatchcase, p, parts))]
