"""Decode step of models with the layers of Llama, without the module calls of transformers.

In a decode step of a small model, transformers spends most of the time outside of torch's kernels: in module calls,
argument handling and operations on small tensors. This step calls the same kernels in the same order on the weights of
the model's modules. On the CPU in float32, its logits are bitwise identical to those of the model's own `forward`.

Shape suffixes: R rows, H heads, D head dimension, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from flowrl.engines.rollout.hf.kv_cache import SlotCache, attend_slots

_MODULES = {"ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding"}
_CLASSES = {
    getattr(modeling, family + name)
    for family, modeling in (("Llama", modeling_llama), ("Qwen2", modeling_qwen2))
    for name in _MODULES
} | {nn.Linear, nn.Embedding, nn.ModuleList}


_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on the length of the sequence."""

_Parameters = Mapping[str, nn.Parameter | None]


def has_short_step(model: PreTrainedModel) -> bool:
    """Returns whether `ShortStep` computes what the model's `forward` computes.

    Excludes modules of other classes than those of Llama and Qwen2, such as adapters and quantized layers. Also
    excludes dtypes other than float32, sliding windows, hooks, and rotary embeddings that depend on the length.
    """
    return model.dtype == torch.float32 and all(
        (type(module) in _CLASSES or name.endswith(".act_fn"))
        and not module._forward_hooks
        and getattr(module, "sliding_window", None) is None
        and getattr(module, "rope_type", "default") in _STATIC_ROPE
        for name, module in model.named_modules()
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters and settings of a decoder layer. Each dictionary has the parameters of a module by name.

    The dictionaries are stored, because looking up submodules and parameters by attribute would take a tenth of a step
    of a small model. A module keeps its dictionary if its parameters are replaced.
    """

    input_norm: _Parameters
    query: _Parameters
    key: _Parameters
    value: _Parameters
    output: _Parameters
    mlp_norm: _Parameters
    gate: _Parameters
    up: _Parameters
    down: _Parameters
    head_dim: int
    scaling: float
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layer: Any) -> "_Layer":  # Any: a decoder layer of Llama or Qwen2
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=layer.input_layernorm._parameters,
            query=attention.q_proj._parameters,
            key=attention.k_proj._parameters,
            value=attention.v_proj._parameters,
            output=attention.o_proj._parameters,
            mlp_norm=layer.post_attention_layernorm._parameters,
            gate=mlp.gate_proj._parameters,
            up=mlp.up_proj._parameters,
            down=mlp.down_proj._parameters,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            activation=mlp.act_fn,
        )


class ShortStep:
    """Decode step of a model for which `has_short_step` is true."""

    def __init__(self, model: Any) -> None:  # Any: Llama or Qwen2
        base = model.model
        self._embedding, self._final_norm, self._head = (
            module._parameters for module in (base.embed_tokens, base.norm, model.lm_head)
        )
        self._layers = [_Layer.of(layer) for layer in base.layers]
        self._epsilon: float = base.norm.variance_epsilon
        self._rotary_embedding: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = base.rotary_emb
        self._rotary_C1D: tuple[Tensor, Tensor] | None = None
        """Cosine and sine of the first C positions."""

    def logits(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Returns the logits [R, V] after one token per row. `cache.begin_step` must have prepared the step."""
        hidden_RE = embedding(ids_R, _weight(self._embedding))
        cos_R1D, sin_R1D = (
            table_C1D.index_select(0, positions_R) for table_C1D in self._rotary(hidden_RE, cache.width)
        )
        half, num_rows = cos_R1D.shape[-1] // 2, ids_R.shape[0]
        mask = cache.mask(hidden_RE.dtype)
        for index, layer in enumerate(self._layers):
            normed_RE = self._norm(layer.input_norm, hidden_RE)
            query_RHD, key_RHD, value_RHD = (
                _project(projection, normed_RE).view(num_rows, -1, layer.head_dim)
                for projection in (layer.query, layer.key, layer.value)
            )
            num_heads = query_RHD.shape[1]
            states_RHD = torch.cat((query_RHD, key_RHD), 1)
            turned_RHD = torch.cat((states_RHD[..., half:], states_RHD[..., :half]), -1)
            states_RHD = (states_RHD * cos_R1D).add_(turned_RHD.mul_(sin_R1D))
            keys, values = cache.append(index, states_RHD[:, num_heads:], value_RHD)
            attended_RE = attend_slots(states_RHD[:, :num_heads], keys, values, mask, layer.scaling)
            hidden_RE = hidden_RE + _project(layer.output, attended_RE)
            normed_RE = self._norm(layer.mlp_norm, hidden_RE)
            gated = layer.activation(_project(layer.gate, normed_RE)).mul_(_project(layer.up, normed_RE))
            hidden_RE = hidden_RE + _project(layer.down, gated)
        return _project(self._head, self._norm(self._final_norm, hidden_RE))

    def _rotary(self, states: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of at least the first `num_positions` positions, [C, 1, D], in the dtype of
        `states`.
        """
        if self._rotary_C1D is None or self._rotary_C1D[0].shape[0] < num_positions:
            positions_1C = torch.arange(2 * num_positions, device=states.device)[None]
            cos_C1D, sin_C1D = (table[0, :, None] for table in self._rotary_embedding(states, positions_1C))
            # The first half of the rotated states is negated. Negating the sine instead gives the same bits.
            half = sin_C1D.shape[-1] // 2
            self._rotary_C1D = cos_C1D, torch.cat((-sin_C1D[..., :half], sin_C1D[..., half:]), -1)
        return self._rotary_C1D

    def _norm(self, parameters: _Parameters, states_RE: Tensor) -> Tensor:
        weight = _weight(parameters)
        return rms_norm(states_RE, weight.shape, weight, self._epsilon)


def _weight(parameters: _Parameters) -> Tensor:
    weight = parameters["weight"]
    assert weight is not None
    return weight


def _project(parameters: _Parameters, states: Tensor) -> Tensor:
    return linear(states, _weight(parameters), parameters.get("bias"))
