"""Compares the costs of flowrl with committed values.

python -m tests.benchmarks.regress [--only NAME ...] [--update]

A cost is a ratio of the CPU times of flowrl and of a baseline in the same run (cost_ratios.py), or a count: of the
code, or of the operations of a micro-batch (operations.py). regress.json has the committed values, and the machine that
measured them. A ratio that is more than 15 % too large is measured again. Exits with 1 if it is too large both times,
or if a count is more than 5 % too large.

`--update` writes the measured values to regress.json. A commit that raises a cost must contain them.
"""

import argparse
import ast
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks import files_per_step
from tests.benchmarks.measure import machine, read_arguments

ROOT = Path(__file__).parents[2]
COMMITTED = Path(__file__).with_suffix(".json")
TOLERANCES = {"ratios": 1.15, "counts": 1.05}
RATIOS = {
    "step": (
        "step plain, grpo / plain",
        "step plain, ppo / plain",
        "step ray, grpo / inline",
        "step ray, ppo / inline",
    ),
    "dispatch": ("call without arguments / raw Ray", "call with 8 rows / raw Ray"),
    "generation": ("engine hf / transformers", "flowrl generate / engine hf"),
    "transfer": ("weight sync / copy of the bytes",),
    "preparation": ("flowrl data prepare / loop",),
    "packing": ("step with packed rows / rows of one length",),
}
"""Names of the ratios of each function of cost_ratios.py."""

SCHEDULES = ("sync", "async")
FILES, STATEMENTS, OPERATIONS = "files", "statements", "operations"

Values = Mapping[str, float]


def files_in_a_step(schedule: str) -> int:
    """Returns the number of files of flowrl/ that a step executes, over all processes."""
    settings = ["batch_size=64", "minibatch_size=32"]
    with tempfile.TemporaryDirectory() as folder:
        return len(files_per_step.files_of(ROOT, schedule, settings, Path(folder)))


def count_statements(package: Path) -> int:
    """Returns the number of statements of a package, without docstrings and other strings."""
    nodes = (node for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        for node in nodes
    )


def name_of_files(schedule: str) -> str:
    return f"files of flowrl/ in a step, {schedule}"


def measure_counts(names: Sequence[str], schedules: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yields the counts by their names."""
    if FILES in names:
        for schedule in schedules:
            yield name_of_files(schedule), files_in_a_step(schedule)
    if STATEMENTS in names:
        packages = sorted(path.parent for path in (ROOT / "flowrl").glob("*/__init__.py"))
        for package in (*packages, ROOT / "recipes"):
            yield f"statements of {package.relative_to(ROOT)}", count_statements(package)
    if OPERATIONS in names:
        from tests.benchmarks import operations  # noqa: PLC0415 (loads torch, which other counts do not need)

        for case, counts in operations.measure():
            yield from ((f"{name} of a micro-batch, {case}", value) for name, value in sorted(counts.items()))


def is_too_large(kind: str, value: float, committed: float | None) -> bool:
    """Returns whether a value exceeds the committed one by more than the tolerance, or whether none is committed."""
    return committed is None or value > committed * TOLERANCES[kind]


def measure_ratios(measurements: Sequence[Callable[[], Values]], committed: Values) -> Iterator[tuple[str, float]]:
    """Yields ratios by their names: the smaller of two measurements if the first one is too large."""
    for measure in measurements:
        values = measure()
        if any(key in committed and is_too_large("ratios", value, committed[key]) for key, value in values.items()):
            again = measure()
            values = {key: min(value, again[key]) for key, value in values.items()}
        yield from values.items()


def _measurements(names: Sequence[str], rounds: int) -> list[Callable[[], Values]]:
    if not set(names) & set(RATIOS):
        return []
    from tests.benchmarks import cost_ratios  # noqa: PLC0415 (loads torch and Ray, which counts do not need)

    return [partial(getattr(cost_ratios, f"{name}_ratios"), rounds) for name in RATIOS if name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = (*RATIOS, FILES, STATEMENTS, OPERATIONS)
    parser.add_argument("--only", nargs="+", default=choices, choices=choices)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--update", action="store_true", help="write the measured values to regress.json")
    arguments = read_arguments(parser, only=["packing", STATEMENTS], rounds=1)
    committed = json.loads(COMMITTED.read_text())
    ran_on, start_s = machine(), time.monotonic()
    sys.stdout.write("| cost | value | committed | |\n|---|---|---|---|\n")
    num_too_large = 0
    known = {} if arguments.update else committed["ratios"]
    ratios = measure_ratios(_measurements(arguments.only, arguments.rounds), known)
    for kind, values in (("ratios", ratios), ("counts", measure_counts(arguments.only, arguments.schedules))):
        for name, value in values:
            old = committed[kind].get(name)
            is_large = is_too_large(kind, value, old) and not arguments.smoke and not arguments.update
            num_too_large += is_large
            shown = "" if old is None else f"{old:g}"
            sys.stdout.write(f"| {name} | {value:.4g} | {shown} | {'too large' if is_large else ''} |\n")
            sys.stdout.flush()
            if arguments.update:
                committed[kind][name] = round(value, 3)
                committed["machine"][kind] = ran_on
    sys.stdout.write(f"\n{time.monotonic() - start_s:.0f} s\n")
    if arguments.update:
        COMMITTED.write_text(json.dumps(committed, indent=1) + "\n")
        return 0
    return int(num_too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
