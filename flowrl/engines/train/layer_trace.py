"""Measures the activations of a model's layers in a pass over fake tensors, which have shapes but no data.

Three layers of the model run with their true widths and number of tokens. Every further layer keeps as many bytes as
the third one. The trace has no head (flowrl/memory/head_memory.py) and takes about 0.3 CPU seconds.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from flowrl.config import ConfigError, LoraConfig
from flowrl.data.dtypes import torch_dtype
from flowrl.data.mixture import read_mixture
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.attention import (
    ROWS,
    Pack,
    has_grouped_kernel,
    pack_rows,
    packing_obstacle,
    repeat_heads,
    rows_attention,
)
from flowrl.engines.models.loading import has_attention_softcap
from flowrl.engines.models.routing import mixture_of
from flowrl.engines.models.sequence_sharding import run_backbone
from flowrl.engines.parallel.sharding import layers

_NUM_LAYERS = 3
"""The first layer differs from the others, because its input is also the output of the embeddings."""

_SUBSTITUTES = {"num_hidden_layers": _NUM_LAYERS, "n_layer": _NUM_LAYERS, "vocab_size": 8, "pad_token_id": 0}
"""Settings of the traced model. The gradient of its embeddings is negligible."""

_IGNORED = ("auto_map", "quantization_config")

_REPEATED = "flowrl_repeated_heads"
"""Name in transformers of attention that repeats keys and values for every query head."""


_EQUAL_LOADS = "flowrl_equal_loads"
"""Name in transformers of an implementation of experts that assumes equal loads."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over the rows of a micro-batch. With `is_training`, also the backward pass."""

    config: str
    """Text of the model's `config.json`."""
    num_rows: int
    row_tokens: int
    device_type: str
    """Device of the run, which determines the attention kernel. The trace itself needs no device."""
    weight_dtype: str
    """Dtype of the weights in the pass."""
    compute_dtype: str | None = None
    """Dtype of autocast. None disables it."""
    is_training: bool = False
    gradient_checkpointing: bool = False
    can_pack: bool = True
    lora: LoraConfig | None = None
    tp: int = 1
    """Tensor-parallel size. The trace has the heads and MLP columns of one rank."""


@dataclass(frozen=True)
class LayerTrace:
    """Bytes that a pass allocates. Weights and the gradients of the optimizer step are not included."""

    per_layer: int
    """Bytes that each layer keeps until its backward pass."""
    cached: int
    """Bytes of each layer's weights that autocast has cast and keeps only until the end of the forward pass."""
    outside: int
    """Bytes that the embeddings and the last norm keep, including the last hidden states."""
    peak: int
    """Largest number of bytes in a layer beyond the bytes that all layers keep."""

    def kept(self, num_layers: int) -> int:
        """Returns the bytes that all layers keep at the start of the backward pass."""
        return self.outside + num_layers * self.per_layer


@lru_cache(maxsize=64)
def trace_layers(traced: Pass) -> LayerTrace:
    """Runs a pass on fake tensors and returns the bytes that it allocates."""
    model, pack = _make_model(traced)
    compute_dtype = None if traced.compute_dtype is None else torch_dtype(traced.compute_dtype)
    live, kept = _LiveBytes(), []
    with FakeTensorMode(allow_non_fake_inputs=True):  # the indices of the pack have data
        model.to_empty(device="cpu")
        ids = torch.zeros((traced.num_rows, traced.row_tokens), dtype=torch.int64)
        ids = ids if pack is None else pack.pack(ids)
        for parameter in model.parameters():
            if traced.is_training and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                live.ignore(parameter.grad)
        for tensor in (ids, *model.parameters(), *model.buffers()):
            live.ignore(tensor)
        for layer in layers(model):
            layer.register_forward_hook(lambda *_: kept.append(live.bytes))
        with live:
            autocast = torch.autocast("cpu", compute_dtype, enabled=compute_dtype is not None)
            with torch.set_grad_enabled(traced.is_training), autocast:
                hidden = run_backbone(model, ids, None, pack)
                during_forward = live.bytes
            # Leaving autocast has freed the weights that no layer has saved.
            total = live.bytes
            cached = (during_forward - total) // _NUM_LAYERS
            if traced.is_training:
                live.peak = 0
                hidden.backward(torch.ones_like(hidden))
    per_layer = kept[-1] - kept[-2] - cached
    peak = live.peak - (total if traced.is_training else during_forward)
    return LayerTrace(per_layer, cached, total - _NUM_LAYERS * per_layer, peak)


def _make_model(traced: Pass) -> tuple[PreTrainedModel, Pack | None]:
    """Returns the model on the meta device, and the pack with which attention allocates what it does in the run."""
    try:
        model = _construct(traced)
    except Exception as error:  # noqa: BLE001 (transformers raises errors of any kind)
        raise ConfigError(
            f"transformers cannot construct the model of its config.json ({type(error).__name__}: {error}): correct "
            f"its settings"
        ) from None
    if traced.lora is not None:
        add_adapter(model, traced.lora.model_copy(update={"modules_to_save": ()}))  # embeddings and head are no layers
    if mixture_of(model) is not None:
        model.set_experts_implementation(_EQUAL_LOADS)
    model.eval()
    if traced.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    has_softcap = has_attention_softcap(model)
    if packing_obstacle(model) is not None or (has_softcap and not traced.can_pack):
        if has_softcap:
            model.set_attn_implementation("eager")
        return model, None
    dtype = torch_dtype(traced.compute_dtype or traced.weight_dtype)
    # Without packing, too, because transformers would create masks for fake tensors that a run does not need.
    model.set_attn_implementation(ROWS if has_grouped_kernel(traced.device_type, dtype) else _REPEATED)
    # One kernel attends within all packed rows on a GPU in half precision. It saves what attention over padded rows of
    # equal length saves. Otherwise, packed rows are split, and their results are concatenated.
    is_one_kernel = traced.device_type == "cuda" and dtype.itemsize == 2 and not has_softcap
    return model, pack_rows([traced.row_tokens] * traced.num_rows) if traced.can_pack and not is_one_kernel else None


def read_architecture(config: str) -> PreTrainedConfig:
    """Returns the configuration of a model from the text of its `config.json`, without remote code."""
    return AutoConfig.for_model(**{name: value for name, value in json.loads(config).items() if name not in _IGNORED})


def _construct(traced: Pass) -> PreTrainedModel:
    """Returns the model with three layers on the meta device."""
    architecture = read_architecture(traced.config)
    architecture.update({name: value for name, value in _SUBSTITUTES.items() if hasattr(architecture, name)})
    if types := getattr(architecture, "layer_types", None):
        architecture.layer_types = (types * _NUM_LAYERS)[:_NUM_LAYERS]
    if traced.tp > 1:
        architecture.head_dim = (
            getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads
        )
        # Tensor parallelism does not shard routed experts.
        is_dense = read_mixture(architecture.to_dict()) is None
        for name in ("num_attention_heads", "num_key_value_heads", *(("intermediate_size",) if is_dense else ())):
            setattr(architecture, name, getattr(architecture, name) // traced.tp)
    with torch.device("meta"):
        model = AutoModel.from_config(
            architecture, dtype=torch_dtype(traced.weight_dtype), attn_implementation="sdpa", trust_remote_code=False
        )
    return model


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have allocated and not freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._storages = WeakIdKeyDictionary()

    def ignore(self, tensor: Tensor) -> None:
        self._storages[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: as in torch
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._storages:
                self._storages[storage] = _Allocation(self, storage.nbytes())
        return result


class _Allocation:
    """Bytes of a storage, which count until the weak dictionary drops this object with the storage."""

    def __init__(self, live: _LiveBytes, num_bytes: int) -> None:
        self._live, self._num_bytes = live, num_bytes
        live.bytes += num_bytes
        live.peak = max(live.peak, live.bytes)

    def __del__(self) -> None:
        self._live.bytes -= self._num_bytes


def _attend_repeated(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **settings: Any
) -> tuple[Tensor, None]:  # Any: as in `rows_attention`
    """Attends with repeated keys and values, which kernels without grouped-query attention need."""
    return rows_attention(module, query, *repeat_heads(query, key, value), *arguments, **settings)


def _run_equal_loads(experts: Any, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Computes experts with equal loads. Allocates what grouped products do, for which fake tensors need bfloat16.

    `experts`: a module of transformers with the weights of all experts of a layer (Any: it has no typed base).
    """
    (num_tokens, num_choices), num_experts = experts_NK.shape, experts.num_experts
    num_pairs = num_tokens * num_choices
    order_S = experts_NK.flatten().argsort()
    filled_S = nn.functional.pad(order_S, (0, -num_pairs % num_experts))
    tokens_ETD = hidden_ND[filled_S // num_choices].unflatten(0, (num_experts, -1))
    with torch.autocast("cpu", enabled=False):  # autocast does not cast the inputs of grouped products
        gate_up, down = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
        gated_ETM = experts._apply_gate(torch.bmm(tokens_ETD.to(gate_up.dtype), gate_up))
        outputs_SD = torch.bmm(gated_ETM, down).flatten(0, 1)[:num_pairs]
    weighted_SD = outputs_SD[order_S.argsort()] * weights_NK.reshape(-1, 1)
    return weighted_SD.unflatten(0, (num_tokens, num_choices)).sum(1).to(hidden_ND.dtype)


AttentionInterface.register(_REPEATED, _attend_repeated)
ExpertsInterface.register(_EQUAL_LOADS, _run_equal_loads)
