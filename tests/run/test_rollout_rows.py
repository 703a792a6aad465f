"""Rows of generated text: selection on the driver, and conversion on the task worker."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from flowrl import Batch, make_tensordict
from flowrl.config import RolloutLogConfig
from flowrl.data.batch.batch import LocalTasks
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.payload import ColumnError
from flowrl.data.chat import ChatTokenizer
from flowrl.report.rollout_log import COLUMNS, TOKEN_VALUES, Row
from flowrl.rewards.row_scorer import RewardCall
from flowrl.run.rollout_rows import collect_rows, collect_training_rows, make_rows


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
    first, second, third = make_rows(table(), [0, 31, 63], trained_version=9)
    assert first == {
        "row": 0,
        "set": None,
        "prompt_id": 4,
        "sample": 0,
        "prompt": "1+1=",
        "response": "2",
        "segments": None,
        "answer": "2",
        "finish_reason": "stop",
        "response_length": 2,
        "environment_length": 0,
        "version": 7,
        "newest_version": 8,
        "staleness": 2,
        "score": 1.0,
        "rewards": {"format": 1.0},
        "other_scores": {"shaped_scores": 0.5},
        "reward_failures": {},
        "advantage": 1.5,
        "tokens": None,
    }
    assert first.keys() | {"step", "kind"} == COLUMNS.keys()
    assert (second["row"], second["finish_reason"], second["answer"], second["advantage"]) == (31, "length", None, -1.0)
    assert second["rewards"] == {"format": 0.0, "style": None} and third["rewards"] == {}
    assert second["reward_failures"] == {"style": "too late"} and third["reward_failures"] == {}
    empty = {name: third[name] for name in ("response_length", "version", "staleness", "advantage")}
    assert empty == {"response_length": 0, "version": None, "staleness": None, "advantage": None}


def test_columns_that_a_recipe_does_not_compute_are_null() -> None:
    (row,) = make_rows(make_tensordict({"prompt": ["a"], "response": ["b"]}), [0])
    given = {"row": 0, "prompt": "a", "response": "b", "other_scores": {}}
    assert row == {name: given.get(name) for name in COLUMNS if name not in ("step", "kind")}


def test_an_evaluation_has_no_staleness() -> None:
    assert [row["staleness"] for row in make_rows(table(), [0, 1, 2])] == [None] * 3


def test_segments_are_saved() -> None:
    parts = [{"kind": "policy", "start": 0, "end": 1, "text": "b"}]
    (row,) = make_rows(make_tensordict({"prompt": ["a"], "response": ["b"], "segments": [parts]}), [0])
    assert row["segments"] == parts


class RecordingTasks(LocalTasks):
    """Runs functions in this process and records the batches that it receives."""

    def __init__(self) -> None:
        self.received: list[Batch] = []

    def reduce(self, fn: Callable, batch: Batch, kwargs: dict[str, Any]) -> LocalRef:
        self.received.append(batch)
        return super().reduce(fn, batch, kwargs)


def make_batch(tasks: LocalTasks, num_rows: int, ids: Sequence[int] = (0,), **tokens: list) -> Batch:
    """A batch whose responses have the tokens `ids`, after a prompt of one token."""
    rows = {
        "prompt": [f"{i}" for i in range(num_rows)],
        "response": ["x"] * num_rows,
        "scores": [i / 4 for i in range(num_rows)],
        "conversation": [[{"role": "user", "content": "x"}]] * num_rows,
    }
    length = 1 + len(ids)
    tokens = {
        "input_ids": [9, *ids] * num_rows,
        "response_mask": [False, *[True] * len(ids)] * num_rows,
        "old_logprobs": [0.0] * length * num_rows,
    } | {name: column * num_rows for name, column in tokens.items()}
    batch = Batch.from_columns(rows, tokens, [length] * num_rows)
    return Batch({name: batch.column(name) for name in batch.columns}, num_rows, tasks)


def save(batch: Batch, tokenizer: str | None = None, **settings: Any) -> list[Row]:
    """Returns the rows of step 3 of the shard of a batch."""
    future = collect_training_rows(batch, RolloutLogConfig(**settings), 3, version=5, tokenizer=tokenizer)
    return [json.loads(line) for line in future.get().lines.splitlines()]


def test_only_the_selected_rows_and_their_columns_are_read() -> None:
    tasks = RecordingTasks()
    rows = save(make_batch(tasks, 64))
    assert [row["row"] for row in rows] == [0, 9, 18, 27, 36, 45, 54, 63]
    assert [(row["prompt"], row["score"]) for row in rows[:2]] == [("0", 0.0), ("9", 2.25)]
    assert {(row["step"], row["kind"]) for row in rows} == {(3, "training")}
    (received,) = tasks.received
    assert received.num_rows == 8
    assert set(received.columns) == {"prompt", "response", "scores", "response_mask"}


@pytest.mark.parametrize(("count", "expected"), [(8, 3), ("all", 3), (2, 2)])
def test_a_small_batch_is_saved_completely(count: int | str, expected: int) -> None:
    assert len(save(make_batch(RecordingTasks(), 3), rows=count)) == expected


def test_all_rows_of_an_evaluation_are_collected() -> None:
    assert len(collect_rows(make_batch(RecordingTasks(), 30)).get()) == 30


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level tokenizer, in which "é" has two tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))} | {"<end>": 256}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def test_tokens_have_their_text_and_values(tokenizer_path: str) -> None:
    ids = ChatTokenizer(tokenizer_path).encode("aé<end>")
    assert len(ids) == 4
    tasks = RecordingTasks()
    batch = make_batch(
        tasks,
        9,
        ids,
        response_mask=[False, True, False, False, True],
        old_logprobs=[0.0, -1.0, 7.0, 7.0, -0.123456789],
        rollout_logprobs=[0.0, -1.5, 7.0, 7.0, math.nan],
        advantages=[0.0, 2.0, 7.0, 7.0, -2.0],
        weight_version=[-1, 4, -1, -1, 5],
    )
    rows = save(batch, tokenizer_path, rows="all", token_rows=3)
    assert [row["row"] for row in rows if row["tokens"]] == [0, 4, 8]
    assert rows[4]["tokens"] == {
        "text": ["a", "", "é", "<end>"],
        "ids": ids,
        "mask": [1, 0, 0, 1],
        "logprobs": [-1.0, None, None, -0.12346],
        "rollout_logprobs": [-1.5, None, None, None],
        "advantages": [2.0, None, None, -2.0],
        "versions": [4, None, None, 5],
        "ratios": [1.6487, None, None, None],
    }
    assert rows[4]["tokens"].keys() <= TOKEN_VALUES.keys()
    tokens, others = tasks.received
    assert (tokens.num_rows, others.num_rows) == (3, 9) and "input_ids" not in others


def test_rows_without_tokens_of_the_policy_have_none(tokenizer_path: str) -> None:
    batch = make_batch(RecordingTasks(), 2, (1, 2), response_mask=[False] * 3)
    assert [row["tokens"] for row in save(batch, tokenizer_path)] == [None, None]


@pytest.mark.parametrize("settings", [{"token_rows": 0}, {}])
def test_tokens_are_optional(tokenizer_path: str, settings: dict[str, int]) -> None:
    tokenizer = tokenizer_path if settings else None  # a policy without a model has no tokenizer
    tasks = RecordingTasks()
    assert all(row["tokens"] is None for row in save(make_batch(tasks, 9), tokenizer, **settings))
    assert len(tasks.received) == 1


def test_a_batch_without_responses_is_rejected() -> None:
    with pytest.raises(ColumnError, match=r"\bresponse\b"):
        collect_rows(Batch.from_rows([{"prompt": "a"}]))
