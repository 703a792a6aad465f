"""Startup time and CPU seconds of imports and commands, compared with `import torch` in the same run.

python -m tests.benchmarks.startup [--repeats N]

CPU seconds are those of the process and of all processes that it starts. `flowrl generate` writes two responses of the
quickstart's untrained model. `flowrl check` checks the config of the quickstart with its 14,200 prompts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from recipes.quickstart.prepare import prepare
from tests.benchmarks.measure import machine, read_arguments

COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "a model class of transformers": ["-c", "from transformers import Qwen2ForCausalLM"],
    "import ray": ["-c", "import ray"],
    "import flowrl": ["-c", "import flowrl"],
    "from flowrl import Placement, Dispatch, register": ["-c", "from flowrl import Dispatch, Placement, register"],
    "flowrl plan": ["-m", "flowrl.cli", "plan", "recipes/ppo/deepseek7b.yaml", "--devices", "8"],
}


def quickstart_commands(folder: Path) -> dict[str, list[str]]:
    """Creates the data and the model of the quickstart in a folder. Returns the commands that use them."""
    prepare(folder / "data", seed=0)
    model, data, prompts = folder / "data/model", folder / "data", folder / "prompts.txt"
    prompts.write_text("1+1=\n2+2=\n")
    settings = {
        "output": folder / "run",
        "actor.model.path": model,
        "critic.model.path": model,
        "data.train": data / "train.jsonl",
        "data.test": data / "test.jsonl",
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return {
        "flowrl generate": [
            *("-m", "flowrl.cli", "generate", str(model)),
            *("--prompts", str(prompts), "--max-tokens", "5"),
        ],
        "flowrl check": ["-m", "flowrl.cli", "check", "recipes/quickstart/ppo.yaml", *overrides],
    }


def measure_s(command: list[str]) -> tuple[float, float]:
    """Runs a command of Python. Returns its seconds, and the CPU seconds of all its processes."""
    before, start_s = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start_s, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu


def main() -> None:
    """Prints medians of whole processes in seconds, with the ratio to `import torch`, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = read_arguments(parser, repeats=1).repeats
    ran_on = machine()
    with TemporaryDirectory() as folder:
        commands = COMMANDS | quickstart_commands(Path(folder))
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                measured[name].append(measure_s(command))
    medians = {name: [statistics.median(values) for values in zip(*m, strict=True)] for name, m in measured.items()}
    torch_s, _ = medians["import torch"]
    rows = {
        name: {"median_s": round(seconds, 3), "ratio_to_torch": round(seconds / torch_s, 3), "cpu_s": round(cpu_s, 2)}
        for name, (seconds, cpu_s) in medians.items()
    }
    sys.stdout.write(json.dumps({"machine": ran_on, "commands": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
