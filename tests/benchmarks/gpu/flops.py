"""Floating-point operations of a training step, and the peak of GPUs."""

from collections.abc import Sequence

from transformers import Qwen2Config

PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "L40S": 362}
"""Part of a GPU's name -> peak of dense bfloat16 products in TFLOP/s, from the data sheets. The first match counts."""


def training_flops(config: Qwen2Config, lengths: Sequence[int], num_trained: int) -> int:
    """Returns the operations of a forward and a backward pass over packed rows.

        6 T P + 6 N V H + attention_flops

    T is the number of tokens, P the number of elements of the layers' matrices, N `num_trained`, V the vocabulary and H
    the hidden size. A product of a token with a matrix of P elements has 2 P operations, and its backward pass has 4 P.
    The head runs only for trained tokens. Norms, activations, the optimizer, and repeated computations (gradient
    checkpointing, tiles of logits) are not counted. The result therefore gives the model FLOPs
    utilization (MFU) of Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B.
    """
    width, key_width = _widths(config)
    attention = 2 * config.hidden_size * width + 2 * config.hidden_size * key_width
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    return 6 * sum(lengths) * layers + 6 * num_trained * head + attention_flops(config, lengths)


def attention_flops(config: Qwen2Config, lengths: Sequence[int]) -> int:
    """Returns the operations of attention in a forward and a backward pass: 6 W L (L + 1) for each layer and row.

    W is the number of heads times the size of a head, and L is the length of the row. A causal row has L (L + 1) / 2
    pairs of query and key. A pair has 4 W operations in the forward pass, for its score and its part of the output, and
    8 W in the backward pass.
    """
    return config.num_hidden_layers * sum(6 * _widths(config)[0] * length * (length + 1) for length in lengths)


def _widths(config: Qwen2Config) -> tuple[int, int]:
    """Returns the widths of the queries and of the keys."""
    head = config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head, (config.num_key_value_heads or config.num_attention_heads) * head


def peak_tflops(gpu: str) -> int | None:
    """Returns the peak of a GPU; None if it is unknown."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in gpu), None)
