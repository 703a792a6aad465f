"""Decode step of models with the layers of Llama, without the module calls of transformers.

In a decode step of a small model, transformers spends most of the time outside of torch's kernels: in module calls,
argument handling and operations on small tensors. This step calls the same kernels in the same order on the weights of
the same modules. On the CPU in float32, its logits are bitwise identical to those of the model's own `forward`.

Shape suffixes: R rows, H heads, D head dimension, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
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


def has_short_step(model: PreTrainedModel) -> bool:
    """Returns whether `short_step` computes what the model's `forward` computes.

    Other classes, sliding windows, hooks and other dtypes are excluded. Adapters and quantized layers have other
    classes.
    """
    return model.dtype == torch.float32 and all(
        (type(module) in _CLASSES or name.endswith(".act_fn"))
        and not module._forward_hooks
        and getattr(module, "sliding_window", None) is None
        for name, module in model.named_modules()
    )


def short_step(model: Any, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:  # Any: Llama or Qwen2
    """Returns the logits [R, V] after one token per row. `cache.begin_step` has prepared the step."""
    base = model.model
    hidden_RE = nn.functional.embedding(ids_R, base.embed_tokens.weight)
    cos_R1D, sin_R1D = base.rotary_emb(hidden_RE, positions_R[:, None])
    # The first half of the rotated states is negated. Negating the sine instead gives the same bits.
    half = sin_R1D.shape[-1] // 2
    sin_R1D = torch.cat((-sin_R1D[..., :half], sin_R1D[..., half:]), -1)
    mask = cache.mask(hidden_RE.dtype)
    for index, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        normed_RE = _norm(layer.input_layernorm, hidden_RE)
        query_RHD, key_RHD, value_RHD = (
            _project(projection, normed_RE).unflatten(1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        num_heads = query_RHD.shape[1]
        states_RHD = torch.cat((query_RHD, key_RHD), 1)
        turned_RHD = torch.cat((states_RHD[..., half:], states_RHD[..., :half]), -1)
        states_RHD = (states_RHD * cos_R1D).add_(turned_RHD.mul_(sin_R1D))
        keys, values = cache.append(index, states_RHD[:, num_heads:], value_RHD)
        attended_RE = attend_slots(states_RHD[:, :num_heads], keys, values, mask, attention.scaling)
        hidden_RE = hidden_RE + _project(attention.o_proj, attended_RE)
        normed_RE = _norm(layer.post_attention_layernorm, hidden_RE)
        gated = mlp.act_fn(_project(mlp.gate_proj, normed_RE)).mul_(_project(mlp.up_proj, normed_RE))
        hidden_RE = hidden_RE + _project(mlp.down_proj, gated)
    return _project(model.lm_head, _norm(base.norm, hidden_RE))


def _norm(module: Any, states_RE: Tensor) -> Tensor:  # Any: an RMSNorm of transformers
    weight = module.weight
    return rms_norm(states_RE, weight.shape, weight, module.variance_epsilon)


def _project(module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight, module.bias)
