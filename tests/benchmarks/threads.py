"""Time of a GRPO step with waiting OpenMP threads that sleep or spin, on idle and on busy cores.

python -m tests.benchmarks.threads [--busy 0 2] [--sides passive default active one] [--rounds N] [--table]

| side | threads | waiting threads |
|---|---|---|
| passive | `threads: null`, without OMP_NUM_THREADS | spin 5,000 times, then sleep, as flowrl sets it |
| default | the same | spin 300,000 times, then sleep: the default of libgomp |
| active | the same | spin |
| one | `threads: 1` | there are none |

The step is that of `tests.benchmarks.step --parts grpo`: 4 prompts x 8 samples, 8 + 32 tokens. The sides take turns of
some steps, in rotating order. A side is stopped (SIGSTOP) during the turns of the others, because its threads may spin.
Ratios are medians over the rounds, relative to the default. `--busy` is the number of other processes that compute.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tests.benchmarks.measure import machine, print_lines, read_arguments
from tests.benchmarks.step import MODELS, cpu_seconds, flowrl, started, write_inputs
from tests.benchmarks.turns import TurnServer

SIDES = {
    "passive": {},
    "default": {"GOMP_SPINCOUNT": "300000"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "one": {},
}
"""Variables of the environment of each side."""

REMOVED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
BASELINE = "default"
LARGEST_IDLE_RATIO = 1.03
"""Largest ratio of the wall times of passive and default on idle cores."""


@dataclass(frozen=True)
class Line:
    """One row of the table. Times are medians in milliseconds per step."""

    busy: int
    model: str
    side: str
    ms: float
    cpu_ms: float
    ratio: float | None
    cpu_ratio: float | None
    target: float | None
    ratios: list[float] = field(repr=False)
    """Ratio of wall times of each round."""


@contextmanager
def computing(count: int) -> Iterator[None]:
    """Runs `count` processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(model: str, names: Sequence[str], busy: int, rounds: int, count: int) -> list[Line]:
    """Runs the sides in turns of `count` steps. The first turn of a side is not measured."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED}
    with tempfile.TemporaryDirectory(prefix="threads-") as name, ExitStack() as stack:
        folder = Path(name)
        write_inputs(folder, model, 8)
        sides = {}
        for side in names:
            server = TurnServer(folder / f"{side}.sock")
            program = flowrl("grpo", threads=1 if side == "one" else None)
            command = program(folder, server.path, 1 + count * (1 + rounds))
            starting = started(command, server, folder / f"{side}.log", environment | SIDES[side])
            process = stack.enter_context(starting)
            process.suspend()
            stack.callback(process.resume)  # before the end of `started`, which waits for the process
            sides[side] = server, process
        stack.enter_context(computing(busy))
        for turn in range(1 + rounds):
            first = turn % len(names)
            for side in (*names[first:], *names[:first]):
                server, process = sides[side]
                process.resume()
                start_cpu_s, start_s = cpu_seconds(process), time.perf_counter()
                server.run_steps(count)
                seconds = time.perf_counter() - start_s
                if turn:
                    times[side].append((seconds / count, (cpu_seconds(process) - start_cpu_s) / count))
                process.suspend()
    return [_line(busy, model, side, times) for side in names]


def _line(busy: int, model: str, side: str, times: dict[str, list[tuple[float, float]]]) -> Line:
    ms, cpu_ms = (round(1e3 * statistics.median(turn[i] for turn in times[side]), 1) for i in (0, 1))
    ratios: tuple[list[float], list[float]] = ([], [])
    if side != BASELINE and BASELINE in times:
        for own, baseline in zip(times[side], times[BASELINE], strict=True):
            for i in (0, 1):
                ratios[i].append(round(own[i] / baseline[i], 3))
    wall, cpu = (round(statistics.median(values), 3) if values else None for values in ratios)
    target = LARGEST_IDLE_RATIO if (busy, side) == (0, "passive") else None
    return Line(busy, model, side, ms, cpu_ms, wall, cpu, target, ratios[0])


HEAD = (
    "| busy processes | model | side | wall time | relative to default | CPU time | relative to default | target |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def row_of(line: Line) -> str:
    """Returns a row of the Markdown table."""
    wall, cpu, target = ("" if value is None else f"{value:.2f}" for value in (line.ratio, line.cpu_ratio, line.target))
    times = f"{line.ms:.0f} ms | {wall} | {line.cpu_ms:.0f} ms | {cpu}"
    return f"| {line.busy} | {line.model} | {line.side} | {times} | {target} |\n"


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="numbers of other processes that compute")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--models", nargs="+", default=["81k"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, busy=[0], sides=["passive"], rounds=1, steps=1)
    disable_progress_bar()
    lines = (
        line
        for busy in arguments.busy
        for model in arguments.models
        for line in measure(model, arguments.sides, busy, arguments.rounds, arguments.steps)
    )
    print_lines(lines, machine(), HEAD, row_of, is_table=arguments.table)


if __name__ == "__main__":
    main()
