"""The small step of `flowrl check`."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowrl.config import load
from flowrl.data.reading.reader import read_conversations
from flowrl.run.checks.model_checks import small_config
from recipes.grpo.config import GRPOConfig


def test_the_small_step_uses_few_rows_and_one_process(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, ["schedule.kind=one_step_off", "rollout.max_response_tokens=4000"], GRPOConfig)
    small = small_config(config, tmp_path)
    assert (small.steps, small.backend, small.output.parent) == (1, "inline", tmp_path)
    assert isinstance(small, GRPOConfig) and small.batch_size == 8 and small.rollout.max_response_tokens < 100
    (copy,) = small.data.training_files
    assert len(copy.source.read_text().splitlines()) == 8 and small.data.test is None
    assert small.actor.engine.strategy == "auto" and small.actor.optimizer == config.actor.optimizer


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json", "rows.parquet", "row.json", "folder"])
def test_the_small_step_reads_the_first_rows_of_any_format(recipe: Path, tmp_path: Path, name: str) -> None:
    train = load(recipe, [], GRPOConfig).data.training_files[0].source
    rows, path = [json.loads(line) for line in train.read_text().splitlines()], tmp_path / name
    match name:
        case "rows.jsonl.gz":
            path.write_bytes(gzip.compress(train.read_bytes()))
        case "rows.json":
            path.write_text(json.dumps(rows, indent=2))
        case "row.json":
            path.write_text(json.dumps(rows[0], indent=2))
        case "rows.parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case "folder":
            path.mkdir()
            shutil.copy(train, path)
    small = small_config(load(recipe, [f"data.train={path}"], GRPOConfig), tmp_path)
    assert isinstance(small, GRPOConfig)
    (copy,) = small.data.training_files
    expected = [row.messages for row in read_conversations(path)][:8]
    assert [row.messages for row in read_conversations(copy)] == expected


@pytest.mark.slow
def test_the_small_step_uses_generated_rows(recipe: Path, tmp_path: Path) -> None:
    settings = ["data.train=[{reasoning_gym: {chain_sum: 1}, rows: 20, seed: 3}]"]
    small = small_config(load(recipe, settings, GRPOConfig), tmp_path)
    assert isinstance(small, GRPOConfig)
    (copy,) = small.data.training_files
    assert [row.columns["task"] for row in read_conversations(copy, kind="prompts")] == ["chain_sum"] * 8
