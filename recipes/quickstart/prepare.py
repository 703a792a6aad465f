"""Creates the data, a character tokenizer and a small untrained model for the quickstart.

Usage: `python -m recipes.quickstart.prepare --output DIR --seed 0`
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from flowrl.checkpoints.run_folder import replacing, write_json
from flowrl.cli.command_parser import CommandParser
from flowrl.config.user_errors import UserError
from recipes.quickstart.task import Problem, deal

SPECIAL = ("<pad>", "<eos>")
CHARACTERS = "0123456789+-="
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '=' }}{% endfor %}"
)
"""Renders a question as `37+58=` and an answer as `95<eos>`, with at most ten tokens together."""

MANIFEST = "prepared.json"


class PrepareError(UserError):
    """Raised if the output folder contains other files."""


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` atomically and returns True. If the folder already has the data of the same seed,
    returns False.

    Writes `sft.jsonl` (conversations with answers), `train.jsonl` and `test.jsonl` (prompts with an `answer` column),
    and `model/` (weights, config, tokenizer). Raises PrepareError if `output` contains other files.
    """
    manifest = {"task": "two-digit addition and subtraction", "seed": seed}
    if (output / MANIFEST).exists() and json.loads((output / MANIFEST).read_text(encoding="utf-8")) == manifest:
        return False
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise PrepareError(
            f"{output} contains files other than the data of seed {seed}: choose another folder, or delete this folder"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as folder:
        folder.mkdir()
        _write_data(folder, seed)
        save_tokenizer(folder / "model")
        save_model(folder / "model", seed)
        write_json(folder / MANIFEST, manifest)
    return True


def _write_data(folder: Path, seed: int) -> None:
    problems = deal(seed)
    write_lines(folder / "sft.jsonl", map(_example, problems.examples))
    write_lines(folder / "train.jsonl", map(_prompt, problems.prompts))
    write_lines(folder / "test.jsonl", map(_prompt, problems.held_out))


def _question(problem: Problem) -> dict[str, str]:
    return {"from": "human", "content": problem.prompt}


def _example(problem: Problem) -> dict:
    return {"messages": [_question(problem), {"from": "assistant", "content": problem.answer}]}


def _prompt(problem: Problem) -> dict:
    return {"messages": [_question(problem)], "answer": problem.answer}


def save_tokenizer(
    folder: Path,
    characters: Iterable[str] = CHARACTERS,
    chat_template: str = CHAT_TEMPLATE,
    words: Iterable[str] = (),
) -> None:
    """Saves a tokenizer with one token per character and per word, an end token, a padding token, and a chat template.

    The tokenizer is a Qwen2 tokenizer without merges, because transformers loads no other class for a Qwen2 model.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    pad, eos = SPECIAL
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=pad, pad_token=pad, eos_token=eos, chat_template=chat_template
    )
    tokenizer.add_tokens(list(words))
    tokenizer.save_pretrained(folder)


def save_model(
    folder: Path,
    seed: int,
    *,
    num_characters: int = len(CHARACTERS),
    num_layers: int = 2,
    hidden_size: int = 128,
    max_tokens: int = 64,
) -> None:
    """Saves an untrained Qwen2 model, initialized from the seed. It has 330,000 parameters by default."""
    config = Qwen2Config(
        vocab_size=len(SPECIAL) + num_characters,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        # With the default of 0.02, a small model learns several times slower.
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    """Writes a JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def create_folder(output: Path, write: Callable[[Path], None]) -> bool:
    """Creates the folder `output` atomically, with the files that `write` writes into it, and returns True. Returns
    False if `output` exists.
    """
    if output.exists():
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as folder:
        folder.mkdir()
        write(folder)
    return True


def run_prepare(
    recipe: str, description: str, seeded: str, prepare: Callable[[Path, int], bool], arguments: Sequence[str] | None
) -> int:
    """Runs the command line of a recipe's program `prepare`, and returns its exit code.

    Args:
        recipe: name of the recipe.
        description: one sentence for `--help`.
        seeded: the random parts of the folder, for `--help`.
        prepare: creates a folder from a seed. Returns False if the folder already exists.
        arguments: words of the command line. None uses the arguments of the process.
    """
    parser = CommandParser(prog=f"python -m recipes.{recipe}.prepare", description=description)
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seeded}")
    options = parser.parse_args(arguments)
    try:
        is_created = prepare(options.output, options.seed)
    except PrepareError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.output} {'created' if is_created else 'exists already'}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Creates the data, the tokenizer and the model of the quickstart."
    return run_prepare("quickstart", description, "the problem sets and the initial weights", prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
