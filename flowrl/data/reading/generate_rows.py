"""Program that writes rows of reasoning-gym as JSON lines. `generated_rows.py` runs it in a separate process.

The program imports nothing of flowrl, so that it starts fast. Its settings are a JSON object in the standard input.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS


def main() -> None:
    """Writes all rows. Exits with a message if the settings are invalid."""
    settings = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # Some tasks print.
    # Some tasks may draw from the global generators.
    random.seed(0)
    numpy.random.seed(0)
    tasks = settings["tasks"]
    if unknown := [name for name in tasks if name not in DATASETS or name == "composite"]:
        names = ", ".join(sorted(set(DATASETS) - {"composite"}))
        sys.exit(f"unknown task {unknown[0]!r} of reasoning_gym {version('reasoning-gym')}; available: {names}")
    datasets = {}
    for name, task in tasks.items():
        config = {**task["options"], "seed": settings["seed"], "size": settings["rows"]}
        with _exit_on_error(f"reasoning_gym.{name} has invalid options {task['options']}", ": correct them"):
            datasets[name] = reasoning_gym.create_dataset(name, **config)
    system = SYSTEM_PROMPTS.get(settings["system"], settings["system"])
    counts = dict.fromkeys(tasks, 0)
    for index in range(settings["rows"]):
        # The task that is furthest behind its share, so that every prefix of the rows has the shares of the weights.
        name = max(tasks, key=lambda task: tasks[task]["weight"] * (index + 1) - counts[task])
        with _exit_on_error(f"reasoning_gym.{name} cannot generate row {counts[name]} with {tasks[name]['options']}"):
            entry = datasets[name][counts[name]]
        counts[name] += 1
        output.write(json.dumps(_row(name, tasks[name]["options"], entry, system), default=str) + "\n")


@contextmanager
def _exit_on_error(problem: str, fix: str = "") -> Iterator[None]:
    """Exits with a message if the package raises an exception, of any class, for options that it cannot fulfill."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (each of its tasks has checks of its own)
        sys.exit(f"{problem} ({error}){fix}")


def _row(name: str, options: dict[str, Any], entry: dict[str, Any], system: str | None) -> dict[str, Any]:
    turns = [{"role": "user", "content": entry["question"]}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    row = {
        "prompt": turns,
        "data_source": "reasoning_gym",
        "task": name,
        "task_options": options,
        "metadata": entry["metadata"],
    }
    if (answer := entry["answer"]) is not None:
        has_tags = system is not None and "<answer>" in system
        row |= {"answer": answer, "completion": f"<answer>{answer}</answer>" if has_tags else answer}
    return row


if __name__ == "__main__":
    main()
