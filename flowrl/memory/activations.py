"""Estimates the activation memory of forward and backward passes from the shape of each tensor.

The estimate has two parts: the tensors that autograd saves in transformers' decoder layers, and the temporary tensors
of the head in flowrl/workers/policy_model.py. tests/memory/test_activations.py compares the layers with autograd.
Shape suffixes: T tokens of a pass, V vocabulary; D, Q, K and M as in model_size.py.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.memory.model_size import ModelSize

Precision = Literal["float32", "half", "autocast"]
"""`float32`: all tensors are float32. `half`: weights have 16 bits in forward and backward passes. `autocast`:
weights are float32, and matrix products have 16 bits."""

DeviceType = Literal["cpu", "cuda"]

Entropy = Literal["none", "value", "gradient"]

TILED_FROM = 8192
"""Vocabulary size from which logits are computed in tiles (flowrl/workers/policy_model.py)."""

CHUNK_ELEMENTS = 2**24
"""Number of logits per chunk for vocabularies below `TILED_FROM` (flowrl/algorithms/logprobs.py)."""

TILE_SIDES = {"cpu": (4096, 2048), "cuda": (4096, 8192)}
"""Rows and columns of a logits tile, for large vocabularies (flowrl/algorithms/hidden_logprobs.py)."""

_Counts = tuple[int, int, int, int]
"""Numbers of saved tensors of shape [T, D], [T, Q], [T, K] and [T, M]."""

_NONE = (0, 0, 0, 0)


@dataclass(frozen=True)
class _SavedTensors:
    """Tensors that autograd saves per layer. In 16-bit training some tensors, such as norm inputs, stay float32."""

    float32: _Counts
    half: _Counts
    half_float32: _Counts
    autocast: _Counts
    autocast_float32: _Counts


# Two norms save input, normalized states and output (6 D). Attention saves rotated queries and its output (2 Q), and
# rotated keys and values (2 K). The gated MLP saves gate, activated gate, up projection and product (4 M).
_LLAMA = _SavedTensors((6, 2, 2, 4), (4, 2, 2, 4), (2, 0, 0, 0), (5, 2, 2, 4), (4, 0, 0, 0))

_SAVED = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "mistral": _LLAMA,
    # Two more norms, over queries and keys.
    "qwen3": _SavedTensors((6, 4, 4, 4), (4, 3, 3, 4), (2, 1, 1, 0), (5, 3, 3, 4), (4, 1, 1, 0)),
    # Norms compute in float32 up to their output.
    "gemma": _SavedTensors((6, 2, 2, 4), (2, 2, 2, 4), (4, 0, 0, 0), (5, 2, 2, 4), (4, 0, 0, 0)),
    # Four norms; keys and values are repeated for every query head. `layer_bytes` adds the attention weights.
    "gemma2": _SavedTensors((10, 4, 0, 4), (2, 4, 0, 4), (8, 0, 0, 0), (5, 4, 0, 4), (8, 0, 0, 0)),
    # Norms save input and output (4 D); queries, keys and values are one matrix product. The activation function is
    # computed in five elementwise steps.
    "gpt2": _SavedTensors((5, 1, 2, 5), (5, 1, 2, 5), _NONE, (3, 1, 2, 5), (2, 0, 0, 0)),
    # ReLU saves only its output.
    "opt": _SavedTensors((5, 1, 2, 1), (5, 1, 2, 1), _NONE, (5, 1, 2, 1), (2, 0, 0, 0)),
    # Half of each head is rotated, which makes another copy of the queries.
    "glm": _SavedTensors((6, 3, 2, 4), (4, 3, 2, 4), (2, 0, 0, 0), (4, 3, 2, 4), (4, 0, 0, 0)),
    "glm4": _SavedTensors((10, 3, 2, 4), (6, 3, 2, 4), (4, 0, 0, 0), (6, 3, 2, 4), (6, 0, 0, 0)),
}

_NORMS = {"gemma2": 4, "glm4": 4}
"""Number of norms per layer that save normalized states for the gradient of the norm's scale (default 2)."""

_NO_SCALE = ("gpt2", "opt")
"""Model families whose norms save the same tensors whether or not the norm's scale is trained."""


def layer_bytes(
    size: ModelSize,
    precision: Precision,
    *,
    max_length: int,
    device_type: DeviceType = "cpu",
    tp: int = 1,
    sp: int = 1,
    adapter_rank: int = 0,
) -> int:
    """Returns the bytes per token that autograd saves in one layer.

    Args:
        max_length: tokens of the longest row, for attention that saves its weights.
        tp: tensor-parallel size, which divides Q, K and M.
        sp: sequence-parallel size.
        adapter_rank: rank of the LoRA adapter; 0 if all weights are trained.
    """
    saved = _SAVED[size.family]
    narrow, wide = {
        "float32": (_NONE, saved.float32),
        "half": (saved.half, saved.half_float32),
        "autocast": (saved.autocast, saved.autocast_float32),
    }[precision]
    total = 2 * _width(size, narrow, tp) + 4 * _width(size, wide, tp)
    # Attention saves the log-sum-exp of each head for the backward pass, and each norm saves its factor.
    total += 4 * (size.heads // tp + 4)
    dtype_bytes = 4 if precision == "float32" else 2
    if sp > 1:
        # The attention output is saved before and after the all-to-all between heads and sequence shards.
        total += dtype_bytes * size.queries
    has_mask = size.window is not None and max_length > size.window
    if has_mask or (device_type == "cuda" and precision == "float32" and size.family != "gemma2"):
        # Keys and values are repeated for every query head (flowrl/engines/models/attention.py).
        total += dtype_bytes * 2 * (size.queries - size.keys) // tp
    if size.family == "gemma2":
        # Soft-capped attention runs without a fused kernel: weights are saved after the cap and after the softmax.
        total += size.heads // tp * max_length * 8
    return total + (_adapter_bytes(size, precision, adapter_rank) if adapter_rank else 0)


def _adapter_bytes(size: ModelSize, precision: Precision, rank: int) -> int:
    """Returns the bytes per token that a LoRA adapter adds, minus the bytes that frozen weights save."""
    matrices = len(size.linears)
    norms = 0 if size.family in _NO_SCALE else _NORMS.get(size.family, 2)
    if precision == "float32":
        return 4 * (matrices * rank - norms * size.hidden)
    if precision == "autocast":
        return 2 * matrices * rank - 4 * norms * size.hidden + 2 * size.queries
    # A float32 adapter on 16-bit weights casts each input to float32 and saves the cast instead of the input.
    inputs = sum(inputs for _, inputs, _ in size.linears)
    dropped = size.hidden + size.hidden + size.mlp
    if size.family.startswith("gemma"):
        return 4 * (matrices * rank + inputs - norms * size.hidden) - 2 * dropped
    return 4 * (matrices * rank + inputs) - 2 * (dropped + norms * size.hidden)


def _width(size: ModelSize, counts: _Counts, tp: int) -> int:
    hidden, queries, keys, mlp = counts
    return hidden * size.hidden + (queries * size.queries + keys * size.keys + mlp * size.mlp) // tp


def backward_bytes(size: ModelSize, precision: Precision, tp: int = 1) -> int:
    """Returns the bytes per token of the largest gradients in a layer: the two factors of the gated MLP product."""
    return (4 if precision == "float32" else 2) * 2 * size.mlp // tp


def inference_bytes(size: ModelSize, precision: Precision, tp: int = 1) -> int:
    """Returns the bytes per token of a layer without autograd: residual stream, input and three MLP activations."""
    dtype_bytes = 2 if precision == "half" else 4
    return dtype_bytes * 2 * size.hidden + (4 if precision == "float32" else 2) * 3 * size.mlp // tp


@dataclass(frozen=True)
class HeadMemory:
    """Peak bytes of the final norm and the head, in addition to the tensors that layers save."""

    saved: int
    """Bytes that the final norm saves: input, normalized states and output."""
    forward: int
    """Bytes at the peak of the head's forward pass."""
    backward: int
    """Bytes at the peak of the head's backward pass, without the gradient of the head's weights."""


def scalar_head_memory(size: ModelSize, precision: Precision, num_tokens: int) -> HeadMemory:
    """Returns the memory of a head with one output, as in critics and reward models."""
    return HeadMemory(num_tokens * _norm_bytes(size, precision), 0, 0)


def policy_head_memory(
    size: ModelSize, precision: Precision, num_tokens: int, entropy: Entropy, device: str
) -> HeadMemory:
    """Returns the memory of a head that computes log-probabilities, and entropies unless `entropy` is "none"."""
    saved = num_tokens * _norm_bytes(size, precision)
    dtype_bytes = 4 if precision == "float32" else 2
    if size.vocabulary < TILED_FROM:
        logits = num_tokens * size.vocabulary
        chunk = 4 * min(logits, CHUNK_ELEMENTS)
        # The previous chunk is freed after the next chunk is allocated.
        previous = chunk if logits > CHUNK_ELEMENTS else 0
        forward = dtype_bytes * logits + (2 if entropy == "none" else 3) * chunk + previous
        # Log-probabilities, and entropies if they are trained, each need one gradient of all logits.
        gradients = 2 if entropy == "gradient" else 1
        return HeadMemory(saved, forward, dtype_bytes * (1 + gradients) * logits + 2 * chunk + previous)
    rows, columns = TILE_SIDES[device]
    tile = 4 * min(num_tokens, rows) * min(size.vocabulary, columns)
    # In 16 bits the matrix product and its gradient are two more tiles of half the bytes each.
    products = 0 if precision == "float32" else tile
    states = num_tokens * size.hidden * (dtype_bytes + 4)
    forward = states + (2 if entropy == "none" else 3) * tile + products
    return HeadMemory(saved, forward, states + (3 if entropy == "gradient" else 2) * tile + products)


def _norm_bytes(size: ModelSize, precision: Precision) -> int:
    return size.hidden * {"float32": 12, "half": 10, "autocast": 12}[precision]
