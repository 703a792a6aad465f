"""The list of seeded faults fits the code, and the program tells found faults from others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded_faults.__main__ import format_table
from tests.seeded_faults.fault_list import FOLDER, KINDS, ROOT, Fault, read_faults

FAULTS = read_faults()


def test_there_are_100_faults() -> None:
    assert len(FAULTS) == 100
    assert {fault.kind for fault in FAULTS} == KINDS


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_patch_applies_once_and_compiles(path: Path) -> None:
    faults = [fault for fault in FAULTS if fault.package == path.stem]
    assert faults
    for fault in faults:
        patched = fault.patch((ROOT / fault.file).read_text(encoding="utf-8"))
        compile(patched, fault.file, "exec", dont_inherit=True)


def test_every_listed_test_exists() -> None:
    names = {name for fault in FAULTS for name in (*fault.tests, *fault.wider)}
    assert [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    path, _, function = name.partition("::")
    defined = f"def {function.partition('[')[0]}("
    return (ROOT / path).exists() and (not function or defined in (ROOT / path).read_text(encoding="utf-8"))


def test_a_patch_whose_text_occurs_twice_is_refused() -> None:
    fault = Fault("twice", "data", "Nothing.", "sign", "a.py", "a", "b", ("tests",))
    with pytest.raises(ValueError, match="twice"):
        fault.patch("a = a")


def test_table_counts_faults_per_package() -> None:
    records = [
        {"id": "a", "package": "data", "found_by": "tests"},
        {"id": "b", "package": "data", "found_by": None},
        {"id": "c", "package": "run", "found_by": "wider"},
    ]
    rows = [re.split(r"\s+", line.strip()) for line in format_table(records).splitlines()]
    assert rows[1:4] == [["data", "2", "1", "0", "1"], ["run", "1", "0", "1", "0"], ["all", "3", "1", "1", "1"]]
    assert rows[4][-1] == "b"


@pytest.mark.slow
def test_a_fault_is_found_and_recorded(tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "tests.seeded_faults", "--only", "mean_of_means", "--output", output]
    for _ in range(2):  # the second call has nothing to run
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=250)
    record, baseline = (json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    assert baseline["is_baseline"]
    assert record["found_by"] == "tests"
    assert record["first_failure"].startswith("tests/data/test_metric.py::")
