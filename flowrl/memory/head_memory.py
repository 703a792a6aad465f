"""Computes the memory of the head in flowrl/engines/train/fsdp/outputs.py from its number of tokens and its vocabulary.

flowrl/engines/train/layer_trace.py measures the other activations. Tracing the head would take seconds, because large
vocabularies have thousands of tiles.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.memory.model_size import ModelSize

Precision = Literal["float32", "half", "autocast"]
"""With `float32`, all tensors are float32. With `half`, weights have 16 bits in forward and backward passes. With
`autocast`, weights are float32, and matrix products have 16 bits."""


Entropy = Literal["none", "value", "gradient"]

TILED_FROM = 8192
"""Vocabulary size from which logits are computed in tiles (flowrl/engines/train/fsdp/outputs.py)."""

CHUNK_ELEMENTS = 2**24
"""Number of logits that are computed together if the vocabulary is smaller (flowrl/algorithms/logprobs.py)."""

TILE_SIDES = {"cpu": (4096, 2048), "cuda": (4096, 8192)}
"""Rows and columns of a logits tile, for large vocabularies (flowrl/algorithms/hidden_logprobs.py)."""


@dataclass(frozen=True)
class HeadMemory:
    """Peak bytes of the head, without the tensors that the layers and the last norm keep."""

    forward: int
    """Bytes at the peak of the head's forward pass."""
    backward: int
    """Bytes at the peak of the head's backward pass, without the gradient of the head's weights."""


def policy_head_memory(
    size: ModelSize, precision: Precision, num_tokens: int, entropy: Entropy, device: str
) -> HeadMemory:
    """Returns the memory of a head that computes log-probabilities, and entropies unless `entropy` is "none"."""
    dtype_bytes = 4 if precision == "float32" else 2
    if size.vocabulary < TILED_FROM:
        logits = num_tokens * size.vocabulary
        chunk = 4 * min(logits, CHUNK_ELEMENTS)
        # The previous chunk is freed after the next chunk is allocated.
        previous = chunk if logits > CHUNK_ELEMENTS else 0
        forward = dtype_bytes * logits + (2 if entropy == "none" else 3) * chunk + previous
        # Log-probabilities, and entropies if they are trained, each need one gradient of all logits.
        gradients = 2 if entropy == "gradient" else 1
        return HeadMemory(forward, dtype_bytes * (1 + gradients) * logits + 2 * chunk + previous)
    rows, columns = TILE_SIDES[device]
    tile = 4 * min(num_tokens, rows) * min(size.vocabulary, columns)
    # In 16 bits the matrix product and its gradient are two more tiles of half the bytes each.
    products = 0 if precision == "float32" else tile
    states = num_tokens * size.hidden * (dtype_bytes + 4)
    # A forward pass frees the product before it needs the second tile, for the entropy.
    forward = states + (tile + products // 2 if entropy == "none" else 2 * tile)
    return HeadMemory(forward, states + (3 if entropy == "gradient" else 2) * tile + products)
