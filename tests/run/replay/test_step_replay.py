"""Columns that calls return are compared with those of a recorded step."""

from pathlib import Path

import torch

from flowrl.checkpoints.table_files import write_table
from flowrl.config import RunConfig
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.run.replay.recording import Recording, read_recording
from flowrl.run.replay.step_replay import ROUNDING, compare_tables


def test_columns_are_compared_bitwise_or_by_their_norm(tmp_path: Path) -> None:
    base = torch.tensor([1.0, 2.0, float("-0.0")])
    columns = {"base": base, "zero": base.abs(), "near": base + 1e-5, "far": base + 0.1}
    for name, column in columns.items():
        write_table(make_tensordict({"x": column, "y": ["a", "b", "c"]}), tmp_path / name)
    assert compare_tables(tmp_path / "base", tmp_path / "base", None) == ""
    assert compare_tables(tmp_path / "base", tmp_path / "zero", None) != ""
    assert compare_tables(tmp_path / "base", tmp_path / "near", ROUNDING) == ""
    difference = compare_tables(tmp_path / "base", tmp_path / "far", ROUNDING)
    assert "column x" in difference and "3 of 3" in difference and "0.1" in difference


def test_missing_and_new_columns_are_named(tmp_path: Path) -> None:
    write_table(make_tensordict({"x": torch.ones(1)}), tmp_path / "one")
    write_table(make_tensordict({"x": torch.ones(1), "z": torch.ones(1)}), tmp_path / "two")
    assert "z is new" in compare_tables(tmp_path / "one", tmp_path / "two", None)
    assert "z is missing" in compare_tables(tmp_path / "two", tmp_path / "one", None)


def test_ranks_and_sharding_make_an_inline_replay_inexact(recorded: RunConfig) -> None:
    checkpoint = read_recording(recorded.output, 2).checkpoint
    roles = {
        "actor": {"world_size": 1, "threads": 1, "is_sharded": True},
        "critic": {"world_size": 2, "threads": 1, "is_sharded": True},
        "reference": {"world_size": 1, "threads": 1, "is_sharded": False},
    }
    recording = Recording(checkpoint, {"roles": roles})
    assert recording.sharded_roles == ["actor", "critic"]
    assert recording.describe_inexactness() == "critic had 2 ranks and actor was sharded"
    assert Recording(checkpoint, {"roles": {"reference": roles["reference"]}}).describe_inexactness() == ""
