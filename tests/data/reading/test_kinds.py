"""Preference pairs and labeled responses: their forms, and errors that name file, line and fix."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import DataFile
from flowrl.data.messages import DataError, Message
from flowrl.data.reading.kinds import Kind
from flowrl.data.reading.reader import read_conversations
from tests.errors import rejects

QUESTION = [{"from": "human", "content": "2+3"}]
GOOD, BAD = ([{"from": "assistant", "content": text}] for text in ("5", "6"))
PAIR = {"context": QUESTION, "chosen": GOOD, "rejected": BAD}
LABELED = {"prompt": QUESTION, "completion": GOOD[0], "label": True}


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": QUESTION[0], "chosen": GOOD[0], "rejected": BAD[0]},
        {"prompt": "2+3", "chosen": "5", "rejected": "6"},
        {"prompt": [{"role": "user", "content": "2+3"}], "chosen": GOOD, "rejected": "6"},
    ],
)
def test_all_forms_of_a_pair_are_equal(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = read_conversations(write(tmp_path, row), kind="preference")
    assert pair.messages == (Message("user", "2+3"),)
    assert pair.chosen == (Message("assistant", "5"),) and pair.rejected == (Message("assistant", "6"),)
    assert "margin" not in pair.columns


def test_a_response_may_have_several_turns_and_a_pair_a_margin(tmp_path: Path) -> None:
    chosen = [*GOOD, {"from": "human", "content": "sure?"}, *GOOD]
    (pair,) = read_conversations(write(tmp_path, PAIR | {"chosen": chosen, "margin": 2}), kind="preference")
    assert [message.role for message in pair.chosen] == ["assistant", "user", "assistant"]
    assert pair.columns["margin"] == 2.0


def test_for_kto_a_pair_is_a_desirable_and_an_undesirable_response(tmp_path: Path) -> None:
    rows = read_conversations(write(tmp_path, LABELED, PAIR, LABELED | {"label": False}), kind="kto")
    assert [row.label for row in rows] == [True, True, False, False]
    assert rows[2].chosen == (Message("assistant", "6"),) and not rows[2].rejected


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_a_pair_with_different_prompts_is_dropped(tmp_path: Path, kind: Kind) -> None:
    other = {"chosen": [*QUESTION, *GOOD], "rejected": [{"from": "human", "content": "3+3"}, *BAD]}
    rows = read_conversations(write(tmp_path, other, PAIR), kind=kind, strict=False)
    assert {row.line for row in rows} == {2}


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ("[1]", ("turn",)),
        ("{", ("JSON",)),
        ({"context": QUESTION, "chosen": GOOD}, ("context", "columns")),
        ({"chosen": GOOD, "rejected": BAD}, ("prompt", "user")),
        (PAIR | {"context": []}, ("context", "turns")),
        (PAIR | {"chosen": 5}, ("chosen", "5", "text")),
        (PAIR | {"rejected": [{"from": "assistant", "content": 6}]}, ("content",)),
        (PAIR | {"rejected": [{"from": "robot", "content": "6"}]}, ("robot", "assistant")),
        (PAIR | {"context": [*QUESTION, *GOOD]}, ("assistant", "user")),
        (PAIR | {"chosen": QUESTION}, ("chosen", "assistant")),
        (PAIR | {"rejected": [*BAD, *QUESTION]}, ("rejected", "assistant")),
        (PAIR | {"rejected": GOOD}, ("chosen", "rejected", "equal")),
        (PAIR | {"margin": -1}, ("margin", -1)),
        (PAIR | {"margin": True}, ("margin", "True")),
        (LABELED, ("label", "chosen", "rejected", "kto")),
        ({"messages": [*QUESTION, *GOOD]}, ("chosen", "rejected", "columns", "sft")),
        ({"prompt": "2+3", "chosen": "5"}, ("no", "rejected", "columns")),
        ({"question": "2+3", "answer": "5"}, ("chosen", "rejected", "columns", "sft")),
    ],
)
def test_an_invalid_pair_is_rejected_with_file_and_line(tmp_path: Path, row: Any, facts: tuple[object, ...]) -> None:
    path = write(tmp_path, PAIR, row)
    with rejects(path, 2, *facts, error=DataError):
        read_conversations(path, kind="preference")


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("preference", {"chosen": "nix"}), ("sft", {"messages": "nix"}), ("kto", {"completion": "reply.nix"})],
)
def test_a_column_that_names_no_key_of_the_row_is_reported(tmp_path: Path, kind: Kind, columns: dict[str, str]) -> None:
    path = write(tmp_path, {"prompt": "2+3", "better": "5", "rejected": "6", "reply": {}})
    ((field, source),) = columns.items()
    with rejects(path, 1, field, source, "columns", "better", error=DataError):
        read_conversations(DataFile(path=path, columns=columns), kind=kind)


def test_a_column_that_a_usable_row_lacks_is_not_a_problem(tmp_path: Path) -> None:
    (row,) = read_conversations(DataFile(path=write(tmp_path, PAIR), columns={"answer": "nix"}), kind="preference")
    assert row.chosen == (Message("assistant", "5"),)


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": QUESTION, "completion": GOOD}, ("label", "true", "false")),
        (LABELED | {"label": 1}, ("label", 1, "true")),
        (LABELED | {"completion": QUESTION}, ("assistant",)),
        ({"prompt": QUESTION, "completion": ""}, ("empty",)),
    ],
)
def test_an_invalid_labeled_response_is_rejected(tmp_path: Path, row: Any, facts: tuple[object, ...]) -> None:
    path = write(tmp_path, LABELED, row)
    with rejects(path, 2, *facts, error=DataError):
        read_conversations(path, kind="kto")
