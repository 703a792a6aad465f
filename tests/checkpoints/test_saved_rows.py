"""Rows saved in a checkpoint are restored exactly, or rejected with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from flowrl.checkpoints.saved_rows import FILE, SavedRows, save_rows
from flowrl.config import UserError
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import from_tensordict, make_tensordict
from flowrl.data.checksums import CheckpointError, checksum_of

KEYS = Batch.from_rows([{"prompt_id": 7, "sample": 0}, {"prompt_id": 7, "sample": 1}, {"prompt_id": 9, "sample": 0}])


def responses(**rows: Any) -> Batch:
    tokens = {
        "response_mask": torch.tensor([False, True, True, True]),
        "weight_version": torch.tensor([-1, 3, 4, 4], dtype=torch.int32),
        "rollout_logprobs": torch.tensor([0.0, -0.1, -float("inf"), float("nan")]),
        "half": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16),
    }
    table = make_tensordict({"response": ["é", "", '"\n'], **rows}, tokens, torch.tensor([3, 0, 1]))
    return Batch.of_payload(from_tensordict(table))


def saved(rows: Batch, folder: Path, keys: Batch = KEYS) -> SavedRows:
    assert save_rows(keys.union(rows), folder / FILE).get() == checksum_of(folder / FILE)
    return SavedRows(folder / FILE, rows.columns)


def test_restored_rows_equal_the_saved_rows(tmp_path: Path) -> None:
    written = responses(
        truncated=torch.tensor([True, False, True]), wide=torch.arange(6).reshape(3, 2), mine=[(1, [2.5])] * 3
    )
    read = saved(written, tmp_path).load(KEYS, None)
    assert set(read.columns) == set(written.columns)
    for name in written.columns:
        expected, actual = written.get(name), read.get(name)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert actual == expected
    assert read.lengths().tolist() == [3, 0, 1]


def test_only_the_selected_rows_are_written(tmp_path: Path) -> None:
    read = saved(responses().rows([2, 0]), tmp_path, KEYS.rows([2, 0])).load(KEYS.rows([2, 0]), None)
    assert read.get("response") == ['"\n', "é"] and read.get("weight_version").tolist() == [4, -1, 3, 4]


def test_the_file_contains_only_tensors(tmp_path: Path) -> None:
    saved(responses(), tmp_path)
    assert load_file(tmp_path / FILE)["tokens/half"].dtype == torch.bfloat16


def test_rows_of_other_prompts_are_rejected(tmp_path: Path) -> None:
    rows = saved(responses(), tmp_path)
    with pytest.raises(AssertionError):
        rows.load(KEYS.rows([1, 0, 2]), None)


@pytest.mark.parametrize("values", [[{1, 2}] * 3, [b"x"] * 3, [{1: "a"}] * 3])
def test_objects_that_cannot_be_restored_exactly_are_rejected(tmp_path: Path, values: list) -> None:
    with pytest.raises(UserError, match=r"\bmine\b"):
        saved(responses(mine=values), tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\bmissing\b"):
        saved(responses(), tmp_path / "missing")


def test_rows_without_tokens_have_no_lengths(tmp_path: Path) -> None:
    table = make_tensordict({"truncated": torch.tensor([True, False, True])})
    assert isinstance(table, TensorDict)
    read = saved(Batch.of_payload(from_tensordict(table)), tmp_path).load(KEYS, None)
    assert read.columns == ("truncated",) and read.get("truncated").tolist() == [True, False, True]
