"""Creates the data, a character tokenizer and a small untrained model for the quickstart.

Usage: `python -m recipes.quickstart.prepare --output DIR --seed 0`
"""

import json
import sys
from collections.abc import Iterable, Sequence
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
    _write_lines(folder / "sft.jsonl", [_example(problem) for problem in problems.examples])
    _write_lines(folder / "train.jsonl", [_prompt(problem) for problem in problems.prompts])
    _write_lines(folder / "test.jsonl", [_prompt(problem) for problem in problems.held_out])


def _write_lines(path: Path, lines: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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
    folder: Path, seed: int, *, num_characters: int = len(CHARACTERS), num_layers: int = 2, max_tokens: int = 64
) -> None:
    """Saves an untrained Qwen2 model, initialized from the seed. It has 330,000 parameters by default."""
    config = Qwen2Config(
        vocab_size=len(SPECIAL) + num_characters,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        # With the default of 0.02, a model with hidden size 128 learns several times slower.
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m recipes.quickstart.prepare",
        description="Creates the data, the tokenizer and the model of the quickstart.",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problem sets and the initial weights")
    options = parser.parse_args(arguments)
    try:
        is_created = prepare(options.output, options.seed)
    except PrepareError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.output} {'created' if is_created else 'exists already'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
