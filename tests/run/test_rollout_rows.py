"""Rows of generated text: selection on the driver, and conversion on the task worker."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flowrl import Batch, make_tensordict
from flowrl.data.batch.batch import LocalTasks
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.payload import ColumnError
from flowrl.report.rollout_log import COLUMNS
from flowrl.rewards.row_scores import RewardCall
from flowrl.run.rollout_rows import collect_rows, make_rows


def call(score: float | None, failure: str | None = None, message: str = "") -> dict[str, Any]:
    return asdict(RewardCall(score, 0.5, failure, message))


def table() -> TensorDict:
    """Two responses of 2 and 1 tokens after prompts of 1 token, and a row without response tokens."""
    rows = {
        "prompt": ["1+1=", "2+2=", "3+3="],
        "response": ["2", "", ""],
        "answer": ["2", None, "6"],
        "prompt_id": torch.tensor([4, 5, 6]),
        "sample": torch.tensor([0, 1, 0]),
        "truncated": torch.tensor([False, True, False]),
        "scores": torch.tensor([1.0, 0.25, 0.0]),
        "shaped_scores": torch.tensor([0.5, 0.25, 0.0]),
        "format": torch.tensor([1.0, 0.0, 0.0]),
        "hidden": torch.zeros(3, 2),
        "difficulty": torch.tensor([1, 2, 3]),
        "reward_calls": [
            {"format": call(1.0)},
            {"format": call(0.0), "style": call(None, "timeout", "too late")},
            {},
        ],
    }
    tokens = {
        "response_mask": torch.tensor([False, True, True, False, True, False]),
        "weight_version": torch.tensor([-1, 7, 8, -1, 8, -1], dtype=torch.int32),
        "advantages": torch.tensor([9.0, 1.0, 2.0, 9.0, -1.0, 9.0]),
    }
    return make_tensordict(rows, tokens, torch.tensor([3, 2, 1]))


def test_a_row_has_all_columns() -> None:
    first, second, third = make_rows(table(), [0, 31, 63])
    assert first == {
        "row": 0,
        "set": None,
        "prompt_id": 4,
        "sample": 0,
        "prompt": "1+1=",
        "response": "2",
        "answer": "2",
        "finish_reason": "stop",
        "response_length": 2,
        "environment_length": 0,
        "version": 7,
        "newest_version": 8,
        "score": 1.0,
        "other_scores": {"shaped_scores": 0.5, "format": 1.0},
        "reward_failures": {},
        "advantage": 1.5,
    }
    assert first.keys() | {"step", "kind"} == COLUMNS.keys()
    assert (second["row"], second["finish_reason"], second["answer"], second["advantage"]) == (31, "length", None, -1.0)
    assert second["reward_failures"] == {"style": "too late"} and third["reward_failures"] == {}
    empty = {name: third[name] for name in ("response_length", "version", "newest_version", "advantage")}
    assert empty == {"response_length": 0, "version": None, "newest_version": None, "advantage": None}


def test_columns_that_a_recipe_does_not_compute_are_null() -> None:
    (row,) = make_rows(make_tensordict({"prompt": ["a"], "response": ["b"]}), [0])
    given = {"row": 0, "prompt": "a", "response": "b", "other_scores": {}}
    assert row == {name: given.get(name) for name in COLUMNS if name not in ("step", "kind")}


class RecordingTasks(LocalTasks):
    """Runs functions in this process and records the batches that it receives."""

    def __init__(self) -> None:
        self.received: list[Batch] = []

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict[str, Any]) -> LocalRef:
        self.received.append(batch)
        return super().reduce(fn, batch, kwargs)


def make_batch(tasks: LocalTasks, num_rows: int) -> Batch:
    rows = {
        "prompt": [f"{i}" for i in range(num_rows)],
        "response": ["x"] * num_rows,
        "scores": [i / 4 for i in range(num_rows)],
        "conversation": [[{"role": "user", "content": "x"}]] * num_rows,
    }
    tokens = {"input_ids": [0] * num_rows, "response_mask": [True] * num_rows, "old_logprobs": [0.0] * num_rows}
    batch = Batch.from_columns(rows, tokens, [1] * num_rows)
    return Batch({name: batch.column(name) for name in batch.columns}, num_rows, tasks)


def test_only_the_selected_rows_and_their_columns_are_read() -> None:
    tasks = RecordingTasks()
    rows = collect_rows(make_batch(tasks, 64), 8).get()
    assert [row["row"] for row in rows] == [0, 9, 18, 27, 36, 45, 54, 63]
    assert [(row["prompt"], row["score"]) for row in rows[:2]] == [("0", 0.0), ("9", 2.25)]
    (received,) = tasks.received
    assert received.num_rows == 8
    assert set(received.columns) == {"prompt", "response", "scores", "response_mask"}


@pytest.mark.parametrize(("limit", "expected"), [(8, 3), (None, 3), (2, 2)])
def test_a_small_batch_is_saved_completely(limit: int | None, expected: int) -> None:
    assert len(collect_rows(make_batch(RecordingTasks(), 3), limit).get()) == expected


def test_a_batch_without_responses_is_rejected() -> None:
    with pytest.raises(ColumnError, match=r"\bresponse\b"):
        collect_rows(Batch.from_rows([{"prompt": "a"}]), 8)
