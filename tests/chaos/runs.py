"""Runs cases in sessions, and compares each with an undisturbed run."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from recipes.quickstart.prepare import prepare
from tests.chaos.faults import DISK, Case
from tests.chaos.program import ROOT
from tests.chaos.session import Result, Session, SessionError
from tests.chaos.training import train
from tests.chaos.variants import EPISODES, read_metrics, variant_config, write_config
from tests.chaos.workers import FOLDER

TESTED = ("flowrl", "recipes")
MARGIN_STEPS = 8
"""A fault needs this number of steps before the end of its run."""
ATTEMPTS = 3
"""Number of runs that look for the phase of a case."""


class PhaseError(Exception):
    """Raised after all other cases if the phase of a case did not occur in any of its attempts."""


def commit_name() -> str:
    """Returns the short name of the last commit that changed the tested code, with `+` after uncommitted changes."""
    is_changed = _git("status", "--porcelain", *TESTED)
    return _git("log", "-1", "--format=%h", "--abbrev=9", *TESTED) + ("+" if is_changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run_reference(folder: Path, task: Path, schedule: str, engine: str, steps: int) -> list[dict[str, float]]:
    """Returns the log records of an undisturbed run; runs it if `folder` has no result of it.

    The run with one process per role is bitwise identical to an inline run, which starts sooner.
    """
    output = folder / f"{schedule}-{engine}-{steps}"
    backend = "inline" if engine in ("hf", EPISODES) else "ray"
    records = folder / f"{output.name}-records"
    limits = {"call_timeout_s": None, "backend": backend}
    config = variant_config(task, output, schedule, engine, steps, records=records, **limits)
    if (output / "summary.json").exists():
        return read_metrics(output)
    (records / "now").mkdir(parents=True, exist_ok=True)
    with _environment(FOLDER, str(records)):
        if backend == "inline":
            with Path(os.devnull).open("w") as unread, contextlib.redirect_stdout(unread):
                train(config)
        else:
            path = write_config(config, folder / f"{output.name}.yaml")
            command = [sys.executable, "-m", "tests.chaos.training", str(path)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(output)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def run_cases(
    cases: list[Case], cache: Path, seed: int, steps: int, until_s: float = math.inf
) -> Iterator[list[Result]]:
    """Runs the cases. Yields the results of one run after another.

    Args:
        cache: folder that keeps the undisturbed runs.
        until_s: monotonic time after which no further fault is injected.
    Raises PhaseError if the phase of a case does not occur.
    """
    commit, num_runs, num_misses = commit_name(), 0, Counter[Case]()
    prepare(cache / "task", seed=0)
    for variant in dict.fromkeys(case.variant for case in cases):
        left = [case for case in cases if case.variant == variant]
        while left and time.monotonic() < until_s:
            yield _run_session(left, num_misses, cache, seed + num_runs, commit, steps, until_s)
            num_runs += 1
    if missed := sorted(case.name for case, count in num_misses.items() if count >= ATTEMPTS):
        raise PhaseError(f"the phases of these cases did not occur in {ATTEMPTS} runs: {', '.join(missed)}")


def _run_session(
    left: list[Case],
    num_misses: Counter[Case],
    cache: Path,
    seed: int,
    commit: str,
    steps: int,
    until_s: float,
) -> list[Result]:
    """Runs cases of one variant until the run or the time ends. Removes these cases from `left`.

    A case whose phase does not occur stays in `left`, up to `ATTEMPTS` times. `num_misses` counts these attempts.
    """
    schedule, engine = left[0].variant
    reference = [] if schedule == "async" else run_reference(cache, cache / "task", schedule, engine, steps)
    folder = Path(tempfile.mkdtemp(prefix="ch", dir="/tmp"))
    has_disk = any(case.target == DISK for case in left) and os.getuid() == 0
    session = Session(folder, cache / "task", schedule, engine, steps, seed, commit, has_disk)
    session.reference = reference
    try:
        while left and session.remaining_steps() > MARGIN_STEPS and time.monotonic() < until_s:
            session.prepare(left[0])
            case = left.pop(0)
            if case.target == DISK and not has_disk:
                sys.stderr.write(f"skipped {case.name}: only root can mount a small disk\n")
                continue
            result = session.take(case)
            if result is None:
                _miss(case, left, num_misses)
                continue
            sys.stderr.write(f"{case.name}: {result.outcome} {result.report_s} {result.progress_s} {result.missing}\n")
            if result.outcome == "stuck" or result.numbers is False:
                break
        session.finish()
    except SessionError as error:
        sys.stderr.write(f"session ended: {error}\n")
        if not session.results:
            _miss(left.pop(0), left, num_misses)
        session.abort()
    finally:
        session.close()
        shutil.rmtree(folder, ignore_errors=True)
    return session.results


def _miss(case: Case, left: list[Case], num_misses: Counter[Case]) -> None:
    """Repeats a case in another run and at another time, unless this was its last attempt."""
    num_misses[case] += 1
    sys.stderr.write(f"{case.name}: attempt {num_misses[case]} of {ATTEMPTS}: its phase did not occur\n")
    if num_misses[case] < ATTEMPTS:
        left.append(case)
