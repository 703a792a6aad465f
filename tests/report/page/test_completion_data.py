import json
from pathlib import Path
from random import Random

import pytest

from flowrl.config import RolloutLogConfig, UserError
from flowrl.report.page.completion_data import completion_data
from flowrl.report.rollout_log import RolloutLog
from tests.report.page.generated_run import make_row


def write_rows(folder: Path, steps: int = 4, rows: int = 3, num_token_rows: int = 1) -> Path:
    log, rng = RolloutLog(folder, RolloutLogConfig()), Random(0)
    for step in range(1, steps + 1):
        log.write("training", step, [make_row(step, i, rng, i < num_token_rows) for i in range(rows)])
    log.write("evaluation", 0, [make_row(0, 0, rng) | {"score": None}])
    return folder


def test_rows_are_columns_in_the_order_of_steps(tmp_path: Path) -> None:
    data, tokens = completion_data(write_rows(tmp_path))
    assert data["num_rows"] == data["num_saved"] == 13
    assert data["step"] == [0, *(step for step in range(1, 5) for _ in range(3))]
    kinds = [data["kind"]["values"][i] for i in data["kind"]["index"]]
    assert kinds == ["evaluation"] + ["training"] * 12
    assert data["score"][0] is None
    assert data["scores"]["exact"][1] in (0.0, 1.0)
    assert data["texts"][data["prompt"][1]].startswith("What is")
    assert len(data["texts"]) == len(set(data["texts"]))
    assert data["has_tokens"] == sorted(tokens["rows"]) == [1, 4, 7, 10]


def test_tokens_have_values_and_a_scale_per_metric(tmp_path: Path) -> None:
    _, tokens = completion_data(write_rows(tmp_path))
    row = tokens["rows"][1]
    assert {"advantage", "ratio", "gap", "version"} <= row["metrics"].keys()
    gap = row["metrics"]["gap"]
    assert len(gap["values"]) == len(row["text"]) == len(row["environment"])
    assert gap["scale"]["low"] == -gap["scale"]["high"]
    assert not any(row["environment"])
    # Advantages of all rows have one scale, because they are often equal within a row.
    assert len({row["metrics"]["advantage"]["scale"]["high"] for row in tokens["rows"].values()}) == 1
    assert len({row["metrics"]["gap"]["scale"]["high"] for row in tokens["rows"].values()}) == 4


def test_limits_keep_evenly_spaced_steps_and_cut_texts(tmp_path: Path) -> None:
    data, tokens = completion_data(write_rows(tmp_path), row_limit=6, max_characters=60, max_tokens=45)
    assert data["num_rows"] <= 6 and data["num_saved"] == 13
    assert data["step"][-1] == 4
    assert data["num_cut"] > 0 and max(map(len, data["response"])) <= data["max_characters"]
    assert list(tokens["rows"]) == data["has_tokens"] and len(tokens["rows"]) == 1


def test_rows_of_earlier_versions_have_no_new_columns(tmp_path: Path) -> None:
    row = make_row(1, 0, Random(0))
    old = {name: value for name, value in row.items() if name not in ("rewards", "staleness", "segments", "tokens")}
    (tmp_path / "training-000001.jsonl").write_text(json.dumps(old | {"other_scores": {"style": 0.5}}) + "\n")
    data, tokens = completion_data(tmp_path)
    assert data["staleness"] == [None] and data["scores"] == {"style": [0.5]}
    assert tokens == {}


def test_segments_are_kept_only_with_an_environment(tmp_path: Path) -> None:
    row = make_row(1, 0, Random(0))
    parts = [("policy", "call"), ("environment", "result")]
    segments = [{"kind": kind, "start": i, "end": i + 1, "text": text} for i, (kind, text) in enumerate(parts)]
    RolloutLog(tmp_path, RolloutLogConfig()).write("training", 1, [row, row | {"segments": segments}])
    data, _ = completion_data(tmp_path)
    assert data["segments"] == {1: [["policy", "call"], ["environment", "result"]]}


def test_segments_and_causes_of_failed_rewards_are_cut_too(tmp_path: Path) -> None:
    segments = [{"kind": kind, "start": 0, "end": 1, "text": "x" * 500} for kind in ("policy", "environment")]
    row = make_row(1, 0, Random(0)) | {"segments": segments, "reward_failures": {"exact": "y" * 500}}
    RolloutLog(tmp_path, RolloutLogConfig()).write("training", 1, [row])
    data, _ = completion_data(tmp_path, max_characters=300)
    texts = [data["failures"][0]["exact"], *(text for _, text in data["segments"][0])]
    assert {len(text) for text in texts} == {data["max_characters"]} and data["num_cut"] >= 3
    assert sum(map(len, (*texts, *data["texts"], *data["response"]))) <= 300


def test_a_step_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    """`max_mb` of an active run removes files. A link without a target is listed, and cannot be read."""
    (write_rows(tmp_path) / "training-000002.jsonl").unlink()
    (tmp_path / "training-000002.jsonl").symlink_to(tmp_path / "removed")
    data, _ = completion_data(tmp_path)
    assert sorted({*data["step"]}) == [0, 1, 3, 4]


@pytest.mark.parametrize("text", ["", "no json\n"])
def test_a_corrupt_shard_is_named(tmp_path: Path, text: str) -> None:
    write_rows(tmp_path)
    (tmp_path / "training-000002.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"training-000002\.jsonl"):
        completion_data(tmp_path)
