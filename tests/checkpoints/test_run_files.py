import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.run_files import read_config, read_inputs, read_metrics, read_summary, read_system
from flowrl.config import UserError


def write_lines(path: Path, lines: list[str], ending: str = "\n") -> Path:
    path.write_text("\n".join(lines) + ending)
    return path


OBJECTS: dict[str, Callable[[Path], Any]] = {
    "summary.json": read_summary,
    "system.json": read_system,
    "inputs.json": read_inputs,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_object_of_a_file_is_returned(tmp_path: Path, name: str) -> None:
    assert OBJECTS[name](tmp_path) is None
    (tmp_path / name).write_text('{"steps": 3}')
    assert OBJECTS[name](tmp_path) == {"steps": 3}


@pytest.mark.parametrize("text", ["{", "[]", b"\xff".decode("latin-1")])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_corrupt_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        OBJECTS[name](tmp_path)


def test_the_settings_of_a_run_are_returned(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert read_config(tmp_path) == {"steps": 3}


@pytest.mark.parametrize("name", ["missing", "file", "folder"])
def test_a_path_that_is_not_a_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=str(tmp_path / name)):
        read_config(tmp_path / name)


def test_a_null_metric_is_not_a_number(tmp_path: Path) -> None:
    records = read_metrics(write_lines(tmp_path / "metrics.jsonl", ['{"step": 1, "kl": null, "reward": 2}']))
    assert records[0]["step"] == 1 and records[0]["reward"] == 2 and math.isnan(records[0]["kl"])


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", ['{"step": 1, "kl": 1.0}', '{"step": 2, "k'], ending="")
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["no json", "[" * 200_000, "[1]", '{"kl": 1.0}', '{"step": 1, "kl": [2]}'])
def test_a_corrupt_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", [json.dumps({"step": 0}), line, json.dumps({"step": 2})])
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)
