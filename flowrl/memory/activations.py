"""What forward and backward passes hold besides weights and gradients, in bytes, counted tensor by tensor.

The counts are those of the tensors that autograd keeps for the backward pass in transformers' layers, and of what the
head of flowrl/workers/policy_model.py makes beside them; tests/memory/test_activations.py compares the first with
autograd. Shape suffixes: T tokens of a pass, V vocabulary; D, Q, K and M as in model_size.py.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.memory.model_size import ModelSize

Precision = Literal["plain", "half", "autocast"]
"""`plain`: float32 throughout. `half`: weights that take part are in half precision, by the model's dtype or fsdp's.
`autocast`: weights in float32, matrix products in half."""

Entropy = Literal["none", "value", "gradient"]

TILED_FROM = 8192
"""Vocabularies from here on never have their logits in memory at once (flowrl/workers/policy_model.py)."""

CHUNK_ELEMENTS = 2**24
"""Logits of a smaller one that are worked on at a time (flowrl/algorithms/logprobs.py)."""

TILE_SIDES = {"cpu": (4096, 2048), "cuda": (4096, 8192)}
"""Rows and columns of a tile of a larger one (flowrl/algorithms/hidden_logprobs.py)."""

_Counts = tuple[int, int, int, int]
"""Tensors of [T, D], [T, Q], [T, K] and [T, M]."""

_NONE = (0, 0, 0, 0)


@dataclass(frozen=True)
class _Kept:
    """What a layer keeps. In half precision some of it, the norms' inputs and the residual stream, stays float32."""

    plain: _Counts
    half: _Counts
    half_float32: _Counts
    autocast: _Counts
    autocast_float32: _Counts


# Each of two norms: its input (the residual stream), the normalised states (for the gradient of its scale), and its
# output (for that of the matrices after it): 6 D. Attention: rotated queries and its output, which is the input of the
# last matrix: 2 Q; rotated keys, and values: 2 K. The gated part: gate, activated gate, the other factor, product: 4 M.
_LLAMA = _Kept((6, 2, 2, 4), (4, 2, 2, 4), (2, 0, 0, 0), (5, 2, 2, 4), (4, 0, 0, 0))

_KEPT = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "mistral": _LLAMA,
    # Two more norms, of queries and keys.
    "qwen3": _Kept((6, 4, 4, 4), (4, 3, 3, 4), (2, 1, 1, 0), (5, 3, 3, 4), (4, 1, 1, 0)),
    # Norms work in float32 up to their output.
    "gemma": _Kept((6, 2, 2, 4), (2, 2, 2, 4), (4, 0, 0, 0), (5, 2, 2, 4), (4, 0, 0, 0)),
    # Four norms; keys and values are copied for every head of queries. `attention_bytes` adds its attention.
    "gemma2": _Kept((10, 4, 0, 4), (2, 4, 0, 4), (8, 0, 0, 0), (5, 4, 0, 4), (8, 0, 0, 0)),
    # Norms keep input and output, 4 D, and the last matrix of attention its input; queries, keys and values are one
    # product. The activation function is a formula of five steps.
    "gpt2": _Kept((5, 1, 2, 5), (5, 1, 2, 5), _NONE, (3, 1, 2, 5), (2, 0, 0, 0)),
    # ReLU keeps its output alone.
    "opt": _Kept((5, 1, 2, 1), (5, 1, 2, 1), _NONE, (5, 1, 2, 1), (2, 0, 0, 0)),
    # Half of each head is rotated, so that queries are put together anew.
    "glm": _Kept((6, 3, 2, 4), (4, 3, 2, 4), (2, 0, 0, 0), (4, 3, 2, 4), (4, 0, 0, 0)),
    "glm4": _Kept((10, 3, 2, 4), (6, 3, 2, 4), (4, 0, 0, 0), (6, 3, 2, 4), (6, 0, 0, 0)),
}

_NORMS = {"gemma2": 4, "glm4": 4}
"""Norms of a layer that keep what they normalised for their scale; 2 where not stated, and none in `_NO_SCALE`."""

_NO_SCALE = ("gpt2", "opt")
"""Families whose norms keep no more when their scale is trained."""


def layer_bytes(
    size: ModelSize, precision: Precision, *, longest: int, tp: int = 1, sp: int = 1, adapter_rank: int = 0
) -> int:
    """What one layer keeps of each token for the backward pass.

    Args:
        longest: tokens of the longest row, for attention whose weights are kept.
        tp: ranks that share the layer's matrices, and with them Q, K and M.
        sp: ranks that share the rows.
        adapter_rank: of a LoRA adapter, beside which no other weight is trained; 0 is none.
    """
    kept = _KEPT[size.kind]
    narrow, wide = {
        "plain": (_NONE, kept.plain),
        "half": (kept.half, kept.half_float32),
        "autocast": (kept.autocast, kept.autocast_float32),
    }[precision]
    total = 2 * _width(size, narrow, tp) + 4 * _width(size, wide, tp)
    # The sum of each head's weights, by which attention's backward pass makes them again; each norm's factor.
    total += 4 * (size.heads // tp + 4)
    item = 4 if precision == "plain" else 2
    if sp > 1:
        # Attention's output is kept twice: as heads of whole rows, and as all heads of a stretch.
        total += item * size.queries
    if size.window is not None and longest > size.window:
        # Attention with a mask has copies of keys and values for every head of queries.
        total += item * 2 * (size.queries - size.keys) // tp
    if size.kind == "gemma2":
        # Its logits are bounded, which no kernel does: weights after the bound and after the softmax.
        total += size.heads // tp * longest * 8
    return total + (_adapter_bytes(size, precision, adapter_rank) if adapter_rank else 0)


def _adapter_bytes(size: ModelSize, precision: Precision, rank: int) -> int:
    """What an adapter adds, and what is not kept for frozen weights."""
    matrices = len(size.linears)
    norms = 0 if size.kind in _NO_SCALE else _NORMS.get(size.kind, 2)
    if precision == "plain":
        return 4 * (matrices * rank - norms * size.hidden)
    if precision == "autocast":
        return 2 * matrices * rank - 4 * norms * size.hidden + 2 * size.queries
    # A float32 adapter beside half weights is given each input in float32, which is kept instead of the half one.
    inputs = sum(inputs for _, inputs, _ in size.linears)
    dropped = size.hidden + size.hidden + size.mlp
    if size.kind.startswith("gemma"):
        return 4 * (matrices * rank + inputs - norms * size.hidden) - 2 * dropped
    return 4 * (matrices * rank + inputs) - 2 * (dropped + norms * size.hidden)


def _width(size: ModelSize, counts: _Counts, tp: int) -> int:
    hidden, queries, keys, mlp = counts
    return hidden * size.hidden + (queries * size.queries + keys * size.keys + mlp * size.mlp) // tp


def backward_bytes(size: ModelSize, precision: Precision, tp: int = 1) -> int:
    """Gradients of a token's states at the widest place of a layer: of the two factors of the gated product."""
    return (4 if precision == "plain" else 2) * 2 * size.mlp // tp


def run_bytes(size: ModelSize, precision: Precision, tp: int = 1) -> int:
    """What a layer holds of each token when nothing is kept: residual stream and input, three of the widest states."""
    item = 2 if precision == "half" else 4
    return item * 2 * size.hidden + (4 if precision == "plain" else 2) * 3 * size.mlp // tp


@dataclass(frozen=True)
class Head:
    """What a policy's head holds at its peaks, beside what the layers keep."""

    kept: int
    """By the last norm: its input, the normalised states, its output."""
    forward: int
    """At the peak of the forward pass."""
    backward: int
    """At that of the backward pass, without the gradient of its weights."""


def no_head(size: ModelSize, precision: Precision, num_tokens: int) -> Head:
    """A head of one output, of a critic or a reward model."""
    return Head(num_tokens * _norm_bytes(size, precision), 0, 0)


def policy_head(size: ModelSize, precision: Precision, num_tokens: int, entropy: Entropy, device: str) -> Head:
    """Of log-probabilities of all tokens of a pass, and of entropies where they are wanted."""
    kept = num_tokens * _norm_bytes(size, precision)
    item = 4 if precision == "plain" else 2
    if size.vocabulary < TILED_FROM:
        logits = num_tokens * size.vocabulary
        chunk = 4 * min(logits, CHUNK_ELEMENTS)
        # The chunk before is dropped when the next one is there.
        before = chunk if logits > CHUNK_ELEMENTS else 0
        forward = item * logits + (2 if entropy == "none" else 3) * chunk + before
        # The gradient of log-probabilities and, where it is wanted, that of entropies, each of all logits.
        gradients = 2 if entropy == "gradient" else 1
        return Head(kept, forward, item * (1 + gradients) * logits + 2 * chunk + before)
    rows, columns = TILE_SIDES[device]
    tile = 4 * min(num_tokens, rows) * min(size.vocabulary, columns)
    # In half precision the product itself and its gradient are tiles too, of half the bytes each.
    products = 0 if precision == "plain" else tile
    states = num_tokens * size.hidden * (item + 4)
    forward = states + (2 if entropy == "none" else 3) * tile + products
    return Head(kept, forward, states + (3 if entropy == "gradient" else 2) * tile + products)


def _norm_bytes(size: ModelSize, precision: Precision) -> int:
    return size.hidden * {"plain": 12, "half": 10, "autocast": 12}[precision]
