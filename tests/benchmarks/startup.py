"""Startup time of imports and `flowrl plan`, compared with `import torch` in the same run.

python -m tests.benchmarks.startup [--repeats N]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from tests.benchmarks.measure import read_arguments

COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import ray": ["-c", "import ray"],
    "import flowrl": ["-c", "import flowrl"],
    "from flowrl import Placement, Dispatch, register": ["-c", "from flowrl import Dispatch, Placement, register"],
    "flowrl plan": ["-m", "flowrl.cli", "plan", "recipes/ppo/deepseek7b.yaml", "--devices", "8"],
}


def main() -> None:
    """Prints medians of whole processes in seconds, with the ratio to `import torch`, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = read_arguments(parser, repeats=1).repeats
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            start_s = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start_s)
    torch_s = statistics.median(seconds["import torch"])
    rows = {
        name: {"median_s": round(statistics.median(s), 3), "ratio_to_torch": round(statistics.median(s) / torch_s, 3)}
        for name, s in seconds.items()
    }
    sys.stdout.write(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
