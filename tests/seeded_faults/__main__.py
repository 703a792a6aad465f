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

from tests.seeded_faults.fault_list import ROOT, Fault, read_faults

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
        if missing and not any(record.get("is_baseline") for record in records):
            records.append(_run_without_fault(copies[0], missing, options.select))
            _write(records[-1], output)
        for record in _run_faults(copies, missing, options.select):
            records.append(record)
            _write(record, output)
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


def _run_without_fault(copy: Path, faults: Sequence[Fault], select: str) -> Record:
    """Runs all tests of the faults on correct code. Raises SystemExit if one fails, which would count as found."""
    start_s = time.monotonic()
    paths = sorted({path for fault in faults for path in (*fault.tests, *fault.wider)})
    result = _pytest(copy, paths, select, "--maxfail=20", limit_s=LIMIT_S * 4)
    if result is None or result.returncode:
        output = "the tests did not end" if result is None else result.stdout[-3000:]
        raise SystemExit(f"tests fail without a fault: correct them first\n{output}")
    return {"is_baseline": True, "num_paths": len(paths), **_describe_run(start_s, select)}


def _run_faults(copies: Sequence[Path], faults: Sequence[Fault], select: str) -> Iterable[Record]:
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def run(fault: Fault) -> Record:
        copy = free.get()
        try:
            return _run_fault(copy, fault, select)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(max(1, len(copies))) as pool:
        yield from pool.map(run, faults)


def _run_fault(copy: Path, fault: Fault, select: str) -> Record:
    path, start_s = copy / fault.file, time.monotonic()
    # The original time keeps the compiled file of the original valid, and invalidates that of the patched file.
    original, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(fault.patch(original), encoding="utf-8")
    try:
        found_by, failure = None, None
        for name, paths in (("tests", fault.tests), ("wider", fault.wider)):
            if paths and failure is None:
                failure = _find_failure(copy, paths, select)
                found_by = None if failure is None else name
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return {
        "id": fault.id,
        "package": fault.package,
        "checksum": fault.checksum,
        "found_by": found_by,
        "first_failure": failure,
        **_describe_run(start_s, select),
    }


def _find_failure(copy: Path, paths: Sequence[str], select: str) -> str | None:
    """Runs tests until one fails, and returns its node id. Returns None if all pass."""
    result = _pytest(copy, paths, select, "-x", limit_s=LIMIT_S)
    if result is None:
        return "time limit of the tests"
    if result.returncode == 0:
        return None
    if _TEST_TIMEOUT in result.stdout + result.stderr:
        return "time limit of a test"
    match = _FAILURE.search(result.stdout)
    if result.returncode not in (1, 2) or match is None:
        raise RuntimeError(f"pytest ended with {result.returncode}: {(result.stdout + result.stderr)[-3000:]}")
    return match[1]


def _pytest(
    copy: Path, paths: Sequence[str], select: str, *arguments: str, limit_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs pytest on the copy. Returns None after the time limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider", "-m", select]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # also for processes that tests start in other folders
    try:
        return subprocess.run(
            [*command, "-n", "0", *arguments, *paths],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


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
