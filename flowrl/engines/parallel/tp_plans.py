"""Tensor-parallel plans of families for which transformers defines none: GPT-2, OPT, GPT-J, Bloom and Falcon.

The attention modules of these families store numbers of heads in attributes. Bloom, and Falcon with ALiBi, have a bias
per head. A plan therefore also divides the numbers of heads, and passes each rank the bias of its own heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TensorParallelPlan:
    """Sharding of a family's layers over ranks. Patterns are module names in the backbone. `*` is a layer index."""

    styles: Mapping[str, str]
    """Pattern of a linear layer -> transformers' name of its parallel style."""
    attention: str = ""
    """Pattern of the attention modules whose heads are divided. Empty if each rank computes all heads."""
    counts: tuple[str, ...] = ()
    """Attributes of the attention modules that contain a number of heads."""
    copied: str = ""
    """Pattern of modules whose outputs are copied, because autograd forbids the model to change gathered outputs in
    place. Empty for no modules.
    """
    biases: Mapping[str, Callable[[Tensor, int], Tensor]] | None = None
    """Argument of the attention modules with values per head -> function that converts these to [B, heads, ...]."""


def _flat_heads(values: Tensor, heads: int) -> Tensor:
    return values.view(-1, heads, *values.shape[1:])


def _as_is(values: Tensor, heads: int) -> Tensor:
    return values


_MLP = {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}
_FUSED = {"self_attention.query_key_value": "colwise", "self_attention.dense": "rowwise"}
"""A fused matrix in which the rows of each head, or of each key-value head, are adjacent."""

PLANS: Mapping[str, TensorParallelPlan] = {
    "gpt2": TensorParallelPlan(
        # The fused matrix has the queries of all heads, then the keys, then the values. The product is gathered, so
        # every rank computes the attention of all heads.
        {
            "h.*.attn.c_attn": "colwise_gather_output",
            "h.*.attn.c_proj": "rowwise_split_input",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        }
    ),
    "opt": TensorParallelPlan(
        {
            **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        "decoder.layers.*.self_attn",
        ("num_heads",),
    ),
    "gptj": TensorParallelPlan(
        {
            **{f"h.*.attn.{name}_proj": "colwise" for name in "qkv"},
            "h.*.attn.out_proj": "rowwise",
            "h.*.mlp.fc_in": "colwise",
            "h.*.mlp.fc_out": "rowwise",
        },
        "h.*.attn",
        ("num_attention_heads",),
    ),
    "bloom": TensorParallelPlan(
        {f"h.*.{name}": style for name, style in (_FUSED | _MLP).items()},
        "h.*.self_attention",
        ("num_heads",),
        biases={"alibi": _flat_heads},
    ),
    "falcon": TensorParallelPlan(
        {f"h.*.{name}": style for name, style in (_FUSED | _MLP).items()},
        "h.*.self_attention",
        ("num_heads", "num_kv_heads"),
        copied="h.*.mlp",
        biases={"alibi": _as_is, "attention_mask": _as_is},
    ),
}
"""Model type -> plan."""


def find_plan(model: PreTrainedModel) -> TensorParallelPlan | None:
    """Returns the plan of a model's family, with patterns for the names in this model. Returns None without a plan."""
    known = PLANS.get(model.config.get_text_config().model_type)
    if known is None:
        return None
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    return replace(
        known,
        styles={f"{prefix}{pattern}": style for pattern, style in known.styles.items()},
        attention=f"{prefix}{known.attention}" if known.attention else "",
        copied=f"{prefix}{known.copied}" if known.copied else "",
    )


def copy_outputs(module: nn.Module) -> None:
    """Makes a module return copies of its outputs, which may be changed in place."""
    module.register_forward_hook(lambda _module, _arguments, output: output.clone())


def divide_heads(module: nn.Module, plan: TensorParallelPlan, heads: int, rank: int, tp: int) -> None:
    """Makes an attention module compute the heads of one rank.

    Args:
        module: attention module, which computes all heads.
        plan: plan of the family.
        heads: number of query heads of the model.
        rank, tp: rank in the tensor-parallel group, and its size.
    """
    for name in plan.counts:
        setattr(module, name, getattr(module, name) // tp)

    def slice_biases(
        _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: arguments of the attention
        sliced = {}
        for name, unflatten in (plan.biases or {}).items():
            values = named.get(name)
            if isinstance(values, Tensor):
                by_head = unflatten(values, heads)
                if by_head.shape[1] == heads:  # a mask that all heads share has size 1
                    own = by_head.narrow(1, rank * (heads // tp), heads // tp)
                    sliced[name] = own.reshape(-1, *values.shape[1:]) if by_head.ndim > values.ndim else own
        return arguments, named | sliced

    if plan.biases:
        module.register_forward_pre_hook(slice_biases, with_kwargs=True)


def for_conv1d(style: ParallelStyle) -> "Conv1dColwise | Conv1dRowwise":
    """Converts a parallel style for `nn.Linear` to a style for `Conv1D` with the same input and output layouts."""
    if isinstance(style, ColwiseParallel):
        return Conv1dColwise(output_layouts=style.output_layouts[0], use_local_output=style.use_local_output)
    assert isinstance(style, RowwiseParallel), "matrices are divided by columns or rows"
    layouts = {"input_layouts": style.input_layouts[0], "output_layouts": style.output_layouts[0]}
    return Conv1dRowwise(**layouts, use_local_output=style.use_local_output)


class Conv1dColwise(ColwiseParallel):
    """Column-wise sharding of GPT-2's `Conv1D`, whose weight is transposed: [inputs, outputs]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class Conv1dRowwise(RowwiseParallel):
    """Row-wise sharding of GPT-2's `Conv1D`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _distribute(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _distribute(
    style: ColwiseParallel | RowwiseParallel, module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]
) -> nn.Module:  # Any: placements have no public base class
    def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, weight in list(part.named_parameters(recurse=False)):
            sharded = distribute_tensor(weight, mesh, [placements[name]])
            part.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))

    # Any: torch annotates the results as None, but its own styles return tensors.
    prepare: Any = partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts)
    finish: Any = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, partition, prepare, finish)
