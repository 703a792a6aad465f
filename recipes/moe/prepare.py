"""Writes a folder with the quickstart's tokenizer and a small mixture of experts with random weights.

Usage: `python -m recipes.moe.prepare --output DIR --seed 0`
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipes.quickstart.prepare import CHARACTERS, SPECIAL, create_folder, run_prepare, save_tokenizer

NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` with weights, config and tokenizer, and returns True. Returns False if the folder
    exists.
    """

    def write(folder: Path) -> None:
        save_tokenizer(folder)
        save_mixture(folder, seed)

    return create_folder(output, write)


def save_mixture(folder: Path, seed: int) -> None:
    """Saves an untrained Qwen3-MoE model with 530,000 parameters, initialized from the seed. A token uses 240,000 of
    them.
    """
    config = Qwen3MoeConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Creates a tokenizer and a small untrained mixture of experts."
    return run_prepare("moe", description, "the initial weights", prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
