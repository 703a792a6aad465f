"""Measures which seeded faults the tests find.

    python -m tests.seeded_faults --output found.jsonl
    python -m tests.seeded_faults --only restored_steps window_of_attention

Copies the repository, applies one fault at a time, and runs the tests that could find it until one fails. Each fault
gives one line of JSON. An interrupted measurement continues where it ended.
"""

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.seeded_faults.fault_list import ROOT, Fault, read_faults
from tests.seeded_faults.pytest_process import Result, make_context, run_pytest

LIMIT_S = 900.0
"""Seconds after which the tests of a fault are ended. A fault that makes a test hang is found."""

_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_TEST_TIMEOUT = "+++ Timeout +++"

Record = dict[str, Any]  # Any: values of JSON


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="ids of faults; default: all")
    parser.add_argument("--select", default="not slow", metavar="MARKS", help="selected tests, as in pytest -m")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of faults at the same time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="add the lines to a file, and skip its faults")
    options = parser.parse_args()
    faults = read_faults()
    if unknown := sorted(set(options.only or ()) - {fault.id for fault in faults}):
        parser.error(f"unknown ids: {', '.join(unknown)}")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, but must be at least 1")
    selected = [fault for fault in faults if not options.only or fault.id in options.only]
    records = _read_records(options.output)
    missing = [fault for fault in selected if _find_record(records, fault) is None]
    _commit_name()  # before the copy, because the repository may change during the measurement
    output = sys.stdout if options.output is None else options.output.open("a", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        copies = [_copy_repository(Path(folder) / str(index)) for index in range(min(options.jobs, len(missing)))]
        runner = _Runner(copies, options.select)
        for record in runner.run_faults(missing):
            records.append(record)
            _write(record, output)
        if missing:
            _write(runner.run_without_fault(records), output)
    known = [record for fault in selected if (record := _find_record(records, fault)) is not None]
    sys.stderr.write(format_table(known))
    return 0


def _read_records(path: Path | None) -> list[Record]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _find_record(records: Iterable[Record], fault: Fault) -> Record | None:
    return next((record for record in records if record.get("checksum") == fault.checksum), None)


def _write(record: Record, output: TextIO) -> None:
    output.write(json.dumps(record) + "\n")
    output.flush()


def _copy_repository(folder: Path) -> Path:
    """Copies all files that git does not ignore, with their times, and returns the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


class _Runner:
    """Runs the tests of faults in copies of the repository, one fault per copy at a time."""

    def __init__(self, copies: Sequence[Path], select: str) -> None:
        self._select = select
        self._copies: queue.Queue[Path] = queue.Queue()
        for copy in copies:
            self._copies.put(copy)
        self._context = make_context()

    def run_faults(self, faults: Sequence[Fault]) -> Iterable[Record]:
        """Yields a record per fault, in their order."""
        with ThreadPoolExecutor(max(1, self._copies.qsize())) as pool:
            yield from pool.map(self._run_fault, faults)

    def run_without_fault(self, records: Iterable[Record]) -> Record:
        """Runs the first failing test of each fault on correct code.

        Raises SystemExit if one fails, because then it has not found the fault.
        """
        start_s, copy = time.monotonic(), self._copies.get()
        failures = [record.get("first_failure") for record in records]
        names = sorted({name for name in failures if name is not None and "::" in name})
        result = self._run(copy, names, "--maxfail=20")
        self._copies.put(copy)
        if names and result.exit_code != 0:
            raise SystemExit(f"tests fail without a fault, remove the lines that name them:\n{result.output[-3000:]}")
        return {"is_baseline": True, "num_tests": len(names), **_describe_run(start_s, self._select)}

    def _run_fault(self, fault: Fault) -> Record:
        copy, start_s = self._copies.get(), time.monotonic()
        path = copy / fault.file
        # The original time keeps the compiled file of the original valid, and invalidates that of the patched file.
        original, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(fault.patch(original), encoding="utf-8")
        found_by, failure = None, None
        try:
            for name, paths in (("tests", fault.tests), ("wider", fault.wider)):
                if paths and failure is None:
                    failure = self._find_failure(copy, paths)
                    found_by = None if failure is None else name
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self._copies.put(copy)
        return {
            "id": fault.id,
            "package": fault.package,
            "checksum": fault.checksum,
            "found_by": found_by,
            "first_failure": failure,
            **_describe_run(start_s, self._select),
        }

    def _find_failure(self, copy: Path, paths: Sequence[str]) -> str | None:
        """Runs tests until one fails, and returns its node id. Returns None if all pass, or if none is selected."""
        result = self._run(copy, paths, "-x")
        if result.exit_code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        if result.exit_code is None or _TEST_TIMEOUT in result.output:
            return "time limit"
        match = _FAILURE.search(result.output)
        if result.exit_code not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) or match is None:
            raise RuntimeError(f"pytest ended with {result.exit_code}: {result.output[-3000:]}")
        return match[1]

    def _run(self, copy: Path, paths: Sequence[str], *arguments: str) -> Result:
        options = ["-q", "-rfE", "--color=no", "-p", "no:cacheprovider", "-m", self._select]
        return run_pytest(self._context, copy, [*options, *arguments, *paths], LIMIT_S)


def _describe_run(start_s: float, select: str) -> Record:
    return {
        "seconds": round(time.monotonic() - start_s, 1),
        "select": select,
        "commit": _commit_name(),
        "date": time.strftime("%Y-%m-%d"),
    }


@cache
def _commit_name() -> str:
    """Returns the abbreviated commit at the first call, with + for changed files."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def format_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of found faults per package, and the ids of the other faults."""
    lines = [f"{'package':<16} faults  tests  wider  not found"]
    packages = [*sorted({record["package"] for record in records}), ""]
    for package in packages:
        own = [record["found_by"] for record in records if package in ("", record["package"])]
        counts = own.count("tests"), own.count("wider"), own.count(None)
        lines.append(f"{package or 'all':<16} {len(own):>6} {counts[0]:>6} {counts[1]:>6} {counts[2]:>10}")
    lost = [record["id"] for record in records if record["found_by"] is None]
    return "\n".join([*lines, f"not found: {', '.join(lost) or 'none'}", ""])


if __name__ == "__main__":
    sys.exit(main())
