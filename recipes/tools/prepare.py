"""Creates problems, a tokenizer with a chat template for tools, and a small untrained model.

Usage: `python -m recipes.tools.prepare --output DIR --seed 0`
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.quickstart.prepare import create_folder, run_prepare, write_lines
from recipes.reasoning.prepare import save_byte_model
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

MAX_TOKENS = 256

NUM_EXAMPLES = 20_000
CALL_SHARE = 0.15
"""Share of the examples of the warm start that call the tool. The others answer at once."""


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` and returns True. Returns False if the folder exists.

    Writes `sft.jsonl` (conversations), `train.jsonl` and `test.jsonl` (questions with the column `answer`), and
    `model/` (weights, config, tokenizer).
    """

    def write(folder: Path) -> None:
        (problems, held_out), generator = deal(seed), random.Random(seed)
        examples = (_example(generator.choice(problems), generator) for _ in range(NUM_EXAMPLES))
        write_lines(folder / "sft.jsonl", examples)
        write_lines(folder / "train.jsonl", map(_prompt, problems))
        write_lines(folder / "test.jsonl", map(_prompt, held_out))
        save_byte_model(folder / "model", seed, CHAT_TEMPLATE, max_tokens=MAX_TOKENS, words=WORDS)

    return create_folder(output, write)


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
    description = "Creates problems, a tokenizer and a small untrained model."
    return run_prepare("tools", description, "the problem sets and the initial weights", prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
