"""The number of operations of a training step: by hand, and as torch counts them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.benchmarks.gpu.flops import attention_flops, peak_tflops, training_flops
from tests.benchmarks.gpu.models import model_config

SMALL = Qwen2Config(
    vocab_size=50,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
"""Matrices of a layer: queries 8 x 8, keys 8 x 4, values 8 x 4, output 8 x 8, and three of 8 x 12: 480 elements."""


def test_flops_of_a_small_model_by_hand() -> None:
    # Rows of 2 and 3 tokens. Layers: 6 x 5 tokens x 3 x 480. Head: 6 x 4 tokens x 50 x 8.
    # Attention: 3 layers x 6 x width 8 x (2 x 3 + 3 x 4).
    assert attention_flops(SMALL, [2, 3]) == 2_592
    assert training_flops(SMALL, [2, 3], num_trained=4) == 43_200 + 9_600 + 2_592


def test_flops_of_the_smallest_qwen_by_hand() -> None:
    # 24 layers of 2 x 896^2 + 2 x 896 x 128 + 3 x 896 x 4864 = 14,909,440 elements, and a head of 151,936 x 896.
    # Attention: 24 x 6 x 896 x 1,024 x 1,025.
    row = 6 * 1024 * 24 * 14_909_440 + 6 * 1023 * 136_134_656 + 24 * 6 * 896 * 1024 * 1025
    assert training_flops(model_config("0.5B"), [1024] * 16, num_trained=16 * 1023) == 16 * row == 50_712_071_897_088


def test_flops_are_those_that_torch_counts() -> None:
    """The eager attention of transformers also computes the pairs that the causal mask removes: L^2 per row."""
    length = 16
    model = Qwen2ForCausalLM(SMALL)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(50, (1, length)), use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in counts.items() if name.endswith("rotary_emb"))
    all_pairs = attention_flops(SMALL, [length]) * 2 * length // (length + 1)
    expected = training_flops(SMALL, [length], num_trained=length) - attention_flops(SMALL, [length]) + all_pairs
    assert counter.get_total_flops() - rotary == expected


@pytest.mark.parametrize(
    ("gpu", "peak"), [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("T4", None)]
)
def test_the_peak_is_found_by_the_name_of_a_gpu(gpu: str, peak: int | None) -> None:
    assert peak_tflops(gpu) == peak
