"""Writes pairs of a correct and a wrong answer to the quickstart's problems, for reward models and DPO.

Usage: `python -m recipes.quickstart.pairs --data DIR --seed 0`
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.checkpoints.run_folder import replacing
from flowrl.cli.command_parser import CommandParser
from recipes.quickstart.task import Problem, deal

NUM_PAIRS = 4_000
MIN_ERROR, MAX_ERROR = 10, 60
"""Range of the difference between a wrong and the correct answer."""


def write_pairs(folder: Path, seed: int) -> None:
    """Writes `pairs.jsonl` (training) and `pairs_test.jsonl` (held-out problems), unless they exist."""
    problems = deal(seed)
    files = {"pairs.jsonl": problems.prompts[:NUM_PAIRS], "pairs_test.jsonl": problems.held_out}
    for name, selected in files.items():
        if not (folder / name).exists():
            generator = random.Random(f"{seed} {name}")
            lines = [json.dumps(make_pair(problem, generator)) for problem in selected]
            with replacing(folder / name) as temporary:
                temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_pair(problem: Problem, generator: random.Random) -> dict:
    error = generator.choice((-1, 1)) * generator.randint(MIN_ERROR, MAX_ERROR)
    answers = {"chosen": problem.answer, "rejected": str(int(problem.answer) + error)}
    context = [{"from": "human", "content": problem.prompt}]
    return {"context": context} | {name: [{"from": "assistant", "content": answer}] for name, answer in answers.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m recipes.quickstart.pairs",
        description="Writes pairs of answers to the problems of the quickstart.",
    )
    parser.add_argument("--data", type=Path, required=True, help="folder that recipes.quickstart.prepare created")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problem sets")
    options = parser.parse_args(arguments)
    write_pairs(options.data, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
