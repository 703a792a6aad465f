"""The store of generated text: shards, retention, resume and reading."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import RolloutLogConfig
from flowrl.report.rollout_log import (
    COLUMNS,
    NUM_SHOWN_ROWS,
    Kind,
    RolloutLog,
    Row,
    encode_rows,
    evenly_spaced,
    read_rows,
    saved_steps,
)
from tests.errors import rejects


def make_row(row: int = 0, **values: Any) -> Row:
    return {"row": row, "prompt": "1+1=", "response": "2", "score": 1.0, "other_scores": {}} | values


def open_log(folder: Path, last_step: int = -1, **settings: Any) -> RolloutLog:
    return RolloutLog(folder / "rollouts", RolloutLogConfig(**settings), last_step)


def shards(folder: Path) -> dict[Kind, list[int]]:
    return {kind: saved_steps(folder / "rollouts", kind) for kind in ("training", "evaluation")}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    rows = [make_row(3, advantage=-0.5, answer=["a", {"b": 1}]), make_row(7, other_scores={"format": 0.25})]
    open_log(tmp_path).write("training", 5, rows)
    stored = {"step": 5, "kind": "training"}
    assert read_rows(tmp_path / "rollouts", "training", 5) == [dict.fromkeys(COLUMNS) | row | stored for row in rows]


@pytest.mark.parametrize("text", ["a\nb\r\n\tc", "\u2028 \x85 \x0c", '"\\', "数学", "\x1b[31m", "\ud800", ""])
def test_every_text_is_stored_exactly_in_one_line(tmp_path: Path, text: str) -> None:
    open_log(tmp_path).write("training", 1, [make_row(response=text), make_row(1)])
    assert [row["response"] for row in read_rows(tmp_path / "rollouts", "training", 1)] == [text, "2"]
    data = (tmp_path / "rollouts" / "training-000001.jsonl").read_bytes()
    assert data.count(b"\n") == 2
    assert json.loads(data.split(b"\n")[0])["response"] == text


def test_values_that_json_lacks_are_null_or_text(tmp_path: Path) -> None:
    open_log(tmp_path).write("training", 1, [make_row(advantage=float("nan"), answer=Path("a/b"))])
    (row,) = read_rows(tmp_path / "rollouts", "training", 1)
    assert (row["advantage"], row["answer"]) == (None, "a/b")


def test_the_shard_determines_step_and_kind(tmp_path: Path) -> None:
    open_log(tmp_path).write("training", 1, [make_row(step=9, kind="evaluation")])
    (row,) = read_rows(tmp_path / "rollouts", "training", 1)
    assert (row["step"], row["kind"]) == (1, "training")


def test_additional_columns_are_kept(tmp_path: Path) -> None:
    open_log(tmp_path).write("training", 1, [make_row(tool_calls=[1, 2])])
    assert read_rows(tmp_path / "rollouts", "training", 1)[0]["tool_calls"] == [1, 2]


def test_due_steps() -> None:
    def due(**settings: Any) -> dict[int, Any]:
        log = RolloutLog(Path("none"), RolloutLogConfig(**settings))
        return {step: own.rows for step in range(1, 11) if (own := log.training_settings(step)) is not None}

    assert due() == {1: 8, 5: 8, 10: 8}
    assert due(every=4, rows="all") == {1: "all", 4: "all", 8: "all"}
    assert due(every=0) == {}
    assert RolloutLog(Path("none"), None).training_settings(1) is None


def test_encoded_rows_are_lines_and_the_first_rows_without_tokens() -> None:
    tokens = {"text": ["2"], "ids": [5], "ratios": [1.0003]}
    encoded = encode_rows("training", 7, [make_row(i, tokens=tokens) for i in range(NUM_SHOWN_ROWS + 1)])
    assert [json.loads(line)["tokens"] for line in encoded.lines.splitlines()] == [tokens] * (NUM_SHOWN_ROWS + 1)
    assert len(encoded.shown) == NUM_SHOWN_ROWS
    assert encoded.shown[3] == {"step": 7, "kind": "training"} | make_row(3, tokens=None)


def test_a_shard_of_an_older_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    line = '{"step": 5, "kind": "training", "row": 0, "score": 0.5, "other_scores": {"format": 1.0}}'
    (folder / "training-000005.jsonl").write_text(line + "\n")
    (row,) = read_rows(folder, "training", 5)
    assert (row["score"], row["other_scores"]) == (0.5, {"format": 1.0})
    assert [row[name] for name in ("rewards", "segments", "staleness", "tokens")] == [None] * 4


def test_a_resumed_run_repeats_steps_without_duplicates(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.write("evaluation", 0, [make_row()])
    for step in (1, 5, 10):
        log.write("training", step, [make_row(response="first")])
    log.write("evaluation", 10, [make_row()])
    log = open_log(tmp_path, last_step=7)
    assert shards(tmp_path) == {"training": [1, 5], "evaluation": [0]}
    log.write("training", 10, [make_row(response="second")])
    assert [row["response"] for row in read_rows(tmp_path / "rollouts", "training", 10)] == ["second"]


def test_a_run_that_starts_over_removes_all_shards(tmp_path: Path) -> None:
    open_log(tmp_path).write("evaluation", 0, [make_row()])
    open_log(tmp_path)
    assert names(tmp_path) == []


def test_an_incomplete_file_of_a_killed_driver_is_not_read_and_is_removed(tmp_path: Path) -> None:
    open_log(tmp_path).write("training", 1, [make_row()])
    (tmp_path / "rollouts" / ".training-000005.jsonl.123.tmp").write_text('{"step": 5, "pro')
    assert shards(tmp_path)["training"] == [1]
    open_log(tmp_path, last_step=5)
    assert names(tmp_path) == ["training-000001.jsonl"]


def test_a_failed_write_keeps_the_old_shard(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.write("training", 1, [make_row()])
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises((ValueError, RecursionError)):
        log.write("training", 1, [make_row(answer=circular)])
    assert names(tmp_path) == ["training-000001.jsonl"]
    assert len(read_rows(tmp_path / "rollouts", "training", 1)) == 1


def size_of_shard(folder: Path, kind: Kind, step: int) -> int:
    return (folder / "rollouts" / f"{kind}-{step:06d}.jsonl").stat().st_size


def test_the_oldest_steps_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    log = open_log(tmp_path, every=1, max_mb=0.01)
    for step in range(1, 9):
        log.write("training", step, [make_row(response="x" * 1800)])
    assert size_of_shard(tmp_path, "training", 8) * 5 < 10_000 < size_of_shard(tmp_path, "training", 8) * 6
    assert shards(tmp_path)["training"] == [4, 5, 6, 7, 8]


def test_the_limit_counts_the_shards_of_the_run_before_a_resume(tmp_path: Path) -> None:
    for step in range(1, 9):
        log = open_log(tmp_path, last_step=step - 1, every=1, max_mb=0.01)
        log.write("training", step, [make_row(response="x" * 1800)])
    assert shards(tmp_path)["training"] == [4, 5, 6, 7, 8]


def test_a_replaced_shard_counts_once(tmp_path: Path) -> None:
    log = open_log(tmp_path, every=1, max_mb=0.01)
    for step in (1, 2, 2, 2, 2, 2, 2):
        log.write("training", step, [make_row(response="x" * 1800)])
    assert shards(tmp_path)["training"] == [1, 2]


def test_the_first_and_the_latest_evaluation_and_the_latest_training_rows_are_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path, every=1, max_mb=1e-6)
    for step in range(5):
        log.write("training", step, [make_row()])
        log.write("evaluation", step, [make_row()])
    assert shards(tmp_path) == {"training": [4], "evaluation": [0, 4]}


def test_without_a_limit_all_steps_are_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path, every=1, max_mb=None)
    for step in range(20):
        log.write("training", step, [make_row()])
    assert shards(tmp_path)["training"] == list(range(20))


def test_a_step_that_is_not_saved_is_rejected_with_the_nearest_saved_steps(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in range(10, 100, 10):
        log.write("training", step, [make_row()])
    with rejects(42, tmp_path / "rollouts", 20, 30, 40, 50, 60) as caught:
        read_rows(tmp_path / "rollouts", "training", 42)
    assert "70" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(("kind", "other"), [("training", "evaluation"), ("evaluation", "training")])
def test_the_other_kind_of_rows_is_suggested(tmp_path: Path, kind: Kind, other: Kind) -> None:
    open_log(tmp_path).write(other, 3, [make_row()])
    with rejects(other, "--evaluation"):
        read_rows(tmp_path / "rollouts", kind, 3)


def test_a_store_without_rows_is_rejected(tmp_path: Path) -> None:
    with rejects("report.rollouts"):
        read_rows(tmp_path, "training", 3)


@pytest.mark.parametrize("content", [b"", b'{"step": 1, "prom', b"[1]\n", b"\xff\n"])
def test_a_corrupt_shard_is_rejected(tmp_path: Path, content: bytes) -> None:
    open_log(tmp_path).write("training", 1, [make_row()])
    path = tmp_path / "rollouts" / "training-000001.jsonl"
    path.write_bytes(content)
    with rejects(path):
        read_rows(tmp_path / "rollouts", "training", 1)


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [(3, 9, [0, 4, 8]), (8, 4, [0, 1, 2, 3]), (1, 9, [0]), (3, 1, [0]), (3, 0, []), (4, 8, [0, 2, 4, 7])],
)
def test_evenly_spaced_indices(count: int, total: int, expected: list[int]) -> None:
    assert evenly_spaced(count, total) == expected
