"""Writes a folder with a byte-level tokenizer and a small model with random weights, for tasks of reasoning-gym.

Usage: `python -m recipes.reasoning.prepare --output DIR --seed 0`
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

from recipes.quickstart.prepare import create_folder, run_prepare, save_model, save_tokenizer

BYTES = tuple(sorted(ByteLevel.alphabet()))
"""The 256 bytes, each as the character that stands for it in the vocabulary of a byte-level tokenizer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""Renders a question as a line, and ends an answer with the end token."""

MAX_TOKENS = 512


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` with weights, config and tokenizer, and returns True. Returns False if the folder
    exists.
    """
    return create_folder(output, lambda folder: save_byte_model(folder, seed, CHAT_TEMPLATE, max_tokens=MAX_TOKENS))


def save_byte_model(folder: Path, seed: int, chat_template: str, *, max_tokens: int, words: Sequence[str] = ()) -> None:
    """Saves a byte-level tokenizer, with a token for each of `words`, and an untrained model of three layers."""
    save_tokenizer(folder, BYTES, chat_template, words)
    save_model(folder, seed, num_characters=len(BYTES) + len(words), num_layers=3, max_tokens=max_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Creates a byte tokenizer and a small untrained model."
    return run_prepare("reasoning", description, "the initial weights", prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
