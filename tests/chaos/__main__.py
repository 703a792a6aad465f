"""Injects faults into training runs and checks the results.

    python -m tests.chaos --list
    python -m tests.chaos --cases 'sync-hf-*' --count 20 --seed 1 --append-table

Every fault gives a row: whether the run continued or was resumed with correct numbers, the reported cause, the seconds
to the report and to progress, and what was left behind. A case whose phase does not occur is repeated. If the phase
never occurs, the program ends with exit code 1. `--append-table` adds the rows to tests/chaos/results.jsonl and writes
the table in docs/failures.md.
"""

import argparse
import fnmatch
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import all_cases, draw_cases
from tests.chaos.runs import PhaseError, commit_name, run_cases
from tests.chaos.table import append_rows

STEPS = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="comma-separated patterns of case names")
    parser.add_argument("--count", type=int, metavar="N", help="number of faults; default: each case once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the times of the faults")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of one run, which takes several faults")
    parser.add_argument("--minutes", type=float, default=math.inf, help="inject no further fault after this time")
    parser.add_argument("--append-table", action="store_true", help="add the rows to the results and to the docs")
    options = parser.parse_args()
    patterns = options.cases.split(",")
    cases = [case for case in all_cases() if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if options.list or not cases:
        sys.stdout.write("".join(f"{case.name}\n" for case in cases))
        return 0 if cases else 2
    drawn = draw_cases(cases, options.count or len(cases), options.seed)
    cache = _cache_of(commit_name())
    until_s = time.monotonic() + 60 * options.minutes
    are_correct = True
    try:
        for results in run_cases(drawn, cache, options.seed, options.steps, until_s):
            text = "".join(json.dumps(result.as_row()) + "\n" for result in results)
            sys.stdout.write(text)
            sys.stdout.flush()
            if options.append_table:
                append_rows(text)
            are_correct &= all(result.correct for result in results)
    except PhaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if are_correct else 1


def _cache_of(commit: str) -> Path:
    """Returns the private folder of the undisturbed runs of a commit; an empty folder for uncommitted code."""
    if commit.endswith("+"):
        return Path(tempfile.mkdtemp(prefix="chaos-"))
    folder = Path(tempfile.gettempdir(), f"chaos-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise SystemExit(f"{folder} is not a private folder of this user: remove it, or set TMPDIR")
    return folder / commit


if __name__ == "__main__":
    sys.exit(main())
