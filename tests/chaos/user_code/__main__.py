"""Runs misbehaving reward functions, environments and tools in short GRPO runs, and records what each run did.

    python -m tests.chaos.user_code --list
    python -m tests.chaos.user_code --kinds 'reward-*' --append-table

`--append-table` replaces the rows of these kinds in the results, and the table in docs/failures.md.
"""

import argparse
import fnmatch
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.user_code.measurement import Measurement
from tests.chaos.user_code.misbehavior_kinds import KINDS
from tests.chaos.user_code.misbehavior_table import replace_row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.user_code", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the names of all kinds")
    parser.add_argument("--kinds", default="*", metavar="PATTERN", help="comma-separated patterns of names")
    parser.add_argument("--append-table", action="store_true", help="replace the rows in the results and in the docs")
    options = parser.parse_args()
    patterns = options.kinds.split(",")
    kinds = [kind for kind in KINDS.values() if any(fnmatch.fnmatch(kind.id, pattern) for pattern in patterns)]
    if options.list or not kinds:
        sys.stdout.write("".join(f"{kind.id}\n" for kind in kinds))
        return 0 if kinds else 2
    folder = Path(tempfile.mkdtemp(prefix="uc", dir="/tmp"))
    num_wrong = 0
    try:
        measurement = Measurement(folder)
        for kind in kinds:
            row = measurement.measure(kind).as_row()
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            num_wrong += bool(row["problems"])
            if options.append_table:
                replace_row(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
