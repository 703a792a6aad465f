"""Writes a folder with a byte-level tokenizer and a small model with random weights, for tasks of reasoning-gym.

Usage: `python -m recipes.reasoning.prepare --output DIR --seed 0`
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

from flowrl.checkpoints.run_folder import replacing
from flowrl.cli.command_parser import CommandParser
from recipes.quickstart.prepare import save_model, save_tokenizer

BYTES = tuple(sorted(ByteLevel.alphabet()))
"""The 256 bytes, each as the character that stands for it in the vocabulary of a byte-level tokenizer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""Renders a question as a line, and ends an answer with the end token."""

NUM_LAYERS, MAX_TOKENS = 3, 512


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` with weights, config and tokenizer, and returns True. Returns False if the folder
    exists.
    """
    if output.exists():
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as folder:
        save_tokenizer(folder, BYTES, CHAT_TEMPLATE)
        save_model(folder, seed, num_characters=len(BYTES), num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m recipes.reasoning.prepare", description="Creates a byte tokenizer and a small untrained model."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    options = parser.parse_args(arguments)
    is_created = prepare(options.output, options.seed)
    sys.stdout.write(f"{options.output} {'created' if is_created else 'exists already'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
