"""Creates problems, a tokenizer with a chat template for tools, and a small untrained model.

Usage: `python -m recipes.tools.prepare --output DIR --seed 0`
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.checkpoints.run_folder import replacing
from flowrl.cli.command_parser import CommandParser
from recipes.quickstart.prepare import save_model, save_tokenizer
from recipes.reasoning.prepare import BYTES
from recipes.tools.task import Problem, deal

WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '"name"', '"multiply"', '"arguments"')
"""Texts with a token of their own. All other text has one token per byte."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>\n"
    "{% else %}{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""Renders a question as a line, a result between tags as Qwen does, and the end token after each response."""

NUM_LAYERS, MAX_TOKENS = 3, 256

NUM_EXAMPLES = 20_000
CALL_SHARE = 0.15
"""Share of the examples of the warm start that call the tool. The others answer at once."""


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` and returns True. Returns False if the folder exists.

    Writes `sft.jsonl` (conversations), `train.jsonl` and `test.jsonl` (questions with the column `answer`), and
    `model/` (weights, config, tokenizer).
    """
    if output.exists():
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    problems, held_out = deal(seed)
    generator = random.Random(seed)
    with replacing(output) as folder:
        folder.mkdir()
        examples = [_example(generator.choice(problems), generator) for _ in range(NUM_EXAMPLES)]
        files = {"sft": examples, "train": map(_prompt, problems), "test": map(_prompt, held_out)}
        for name, rows in files.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        save_tokenizer(folder / "model", BYTES, CHAT_TEMPLATE, words=WORDS)
        num_tokens = len(BYTES) + len(WORDS)
        save_model(folder / "model", seed, num_characters=num_tokens, num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS)
    return True


def _prompt(problem: Problem) -> dict:
    a, b = problem
    return {"messages": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}


def _example(problem: Problem, generator: random.Random) -> dict:
    """Returns a conversation that answers at once, or calls the tool and copies its result."""
    (a, b), row = problem, _prompt(problem)
    turns = [{"role": "assistant", "content": row["answer"]}]
    if generator.random() < CALL_SHARE:
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        result = {"role": "tool", "content": row["answer"]}
        turns = [{"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}, result, *turns]
    return {"messages": [*row["messages"], *turns]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m recipes.tools.prepare", description="Creates problems, a tokenizer and a small untrained model."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problem sets and the initial weights")
    options = parser.parse_args(arguments)
    is_created = prepare(options.output, options.seed)
    sys.stdout.write(f"{options.output} {'created' if is_created else 'exists already'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
