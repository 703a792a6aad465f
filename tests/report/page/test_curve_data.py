import json
from pathlib import Path

import pytest

from flowrl.config import UserError
from flowrl.report.page.curve_data import curve_data, read_metrics


def write_lines(path: Path, lines: list[str], ending: str = "\n") -> Path:
    path.write_text("\n".join(lines) + ending)
    return path


def test_metrics_of_different_steps_are_in_different_groups() -> None:
    records = [
        {"step": 0, "accuracy": 0.5},
        {"step": 1, "reward": 1.0, "elapsed_s": 2.0, "response_tokens": 10.0},
        {"step": 2, "reward": 2.0, "elapsed_s": 5.0, "response_tokens": 30.0, "accuracy": 0.75},
    ]
    groups = {tuple(group["metrics"]): group for group in curve_data(records)["groups"]}
    assert groups["accuracy",] == {
        "step": [0, 2],
        "time": [0, 5],
        "tokens": [0, 40],
        "metrics": {"accuracy": [0.5, 0.75]},
    }
    assert groups["response_tokens", "reward"]["metrics"]["reward"] == [1, 2]
    assert groups["response_tokens", "reward"]["tokens"] == [10, 40]


def test_a_long_curve_has_the_mean_and_the_range_of_buckets() -> None:
    records = [{"step": step, "reward": value} for step, value in enumerate([1.0, 3.0, 5.0, -1.0], start=1)]
    (group,) = curve_data(records, max_buckets=2)["groups"]
    assert group["step"] == [1.5, 3.5]
    assert (group["metrics"], group["low"], group["high"]) == (
        {"reward": [2, 2]},
        {"reward": [1, -1]},
        {"reward": [3, 5]},
    )
    assert "time" not in group and "tokens" not in group


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    lines = ['{"step": 1, "kl": null}', '{"step": 2, "kl": 0.5}']
    (group,) = curve_data(read_metrics(write_lines(tmp_path / "metrics.jsonl", lines)))["groups"]
    assert (group["step"], group["metrics"]) == ([2], {"kl": [0.5]})


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", ['{"step": 1, "kl": 1.0}', '{"step": 2, "k'], ending="")
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["no json", "[1]", '{"kl": 1.0}', '{"step": 1, "kl": [2]}'])
def test_a_corrupt_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", [json.dumps({"step": 0}), line, json.dumps({"step": 2})])
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)
