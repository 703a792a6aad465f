"""Columns of a batch are stored and read without a change."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from flowrl.checkpoints.table_files import ObjectError, from_json, read_batch, read_columns, to_json, write_table
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import from_tensordict, make_tensordict
from flowrl.data.checksums import FileChecksum, checksum_of
from flowrl.run.replay.call_log import save_table


def table() -> TensorDict:
    rows = {
        "scores": torch.tensor([0.1, float("nan")]),
        "answer": ["x", ""],
        "calls": [{"a": (1, [2.5, None])}, {}],
    }
    tokens = {"input_ids": torch.tensor([3, 4, 5]), "logprobs": torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)}
    return make_tensordict(rows, tokens, torch.tensor([1, 2]))


def test_tensors_and_objects_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    batch = Batch.of_payload(from_tensordict(table()))
    written = save_table(batch, path).get()
    assert isinstance(written, FileChecksum) and written == checksum_of(path)
    read = read_batch(path)
    assert set(read.columns) == set(batch.columns) and read.lengths().tolist() == [1, 2]
    for name in ("input_ids", "logprobs"):
        assert read.get(name).dtype == batch.get(name).dtype and torch.equal(read.get(name), batch.get(name))
    assert torch.equal(read.get("scores").view(torch.int32), batch.get("scores").view(torch.int32))
    assert read.get("answer") == ["x", ""] and read.get("calls") == [{"a": (1, [2.5, None])}, {}]
    assert read_columns(path)["length"].tolist() == [1, 2]  # pyright: ignore[reportAttributeAccessIssue] (a tensor)


def test_an_object_of_another_class_is_named(tmp_path: Path) -> None:
    table = make_tensordict({"column": [Path("x")]})
    with pytest.raises(ObjectError, match=r"\bcolumn\b.*\bPosixPath\b"):
        write_table(table, tmp_path / "rows")
    result = save_table(Batch.of_payload(from_tensordict(table)), tmp_path / "rows").get()
    assert isinstance(result, str) and "column" in result and "PosixPath" in result


@pytest.mark.parametrize("value", [None, True, 3, 0.1, "x", [1, (2, ())], {"a": {"b": []}}])
def test_values_are_restored(value: object) -> None:
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {"__tuple__": []}, {1}, b"x", torch.tensor(1)])
def test_values_that_json_would_change_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        to_json(value)
