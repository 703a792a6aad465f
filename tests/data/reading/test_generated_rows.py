"""Rows of reasoning-gym as data."""

import io
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import DataFile
from flowrl.data.messages import DataError
from flowrl.data.reading import generate_rows
from flowrl.data.reading.generated_rows import _generator_settings, generate_lines
from flowrl.data.reading.raw_rows import read_chunks
from flowrl.data.reading.reader import count_rows, read_conversations
from tests.errors import rejects
from tests.slow_cases import slow

TASKS = {"leg_counting": 3, "basic_arithmetic": 1}

HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks that draw from Python sets."""


def source(tasks: dict[str, Any], **settings: Any) -> DataFile:
    return DataFile.model_validate({"reasoning_gym": tasks, "rows": 8, **settings})


def rows(tasks: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in generate_lines(source(tasks, **settings))]


@pytest.mark.slow
def test_every_prefix_has_the_shares_of_the_weights() -> None:
    names = [row["task"] for row in rows(TASKS)]
    assert Counter(names[:4]) == Counter(names[4:]) == TASKS


def test_rows_are_conversations_with_columns() -> None:
    (first, *_) = read_conversations(source({"leg_counting": 1}), kind="prompts")
    assert [message.role for message in first.messages] == ["user"]
    assert "legs" in first.messages[0].content
    assert first.columns["data_source"] == "reasoning_gym" and first.columns["task"] == "leg_counting"
    assert first.columns["answer"].isdigit()
    assert first.columns["metadata"]["source_dataset"] == "leg_counting"
    assert first.location == "reasoning_gym:leg_counting, line 1"


@pytest.mark.slow
def test_rows_can_be_used_for_sft() -> None:
    (first, *_) = read_conversations(source({"leg_counting": 1}), kind="sft")
    assert first.messages[-1].role == "assistant" and first.messages[-1].content == first.columns["answer"]


@pytest.mark.slow
def test_a_system_message_may_request_answer_tags() -> None:
    (row, *_) = rows({"leg_counting": 1}, system="default")
    assert row["prompt"][0]["role"] == "system" and "<answer>" in row["prompt"][0]["content"]
    assert row["completion"] == f"<answer>{row['answer']}</answer>"
    (row, *_) = rows({"leg_counting": 1}, system="Be short.")
    assert row["prompt"][0]["content"] == "Be short." and row["completion"] == row["answer"]


def test_options_of_a_task_are_applied() -> None:
    option = {"options": {"min_animals": 1, "max_animals": 1, "max_instances": 1}}
    assert all(row["metadata"]["num_animals"] == 1 for row in rows({"leg_counting": option}))


@pytest.mark.slow
def test_more_rows_have_the_same_start() -> None:
    assert rows(TASKS, rows=20)[:8] == rows(TASKS)


def test_splits_and_seeds_have_different_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"chain_sum": {"options": {"min_digits": 8, "max_digits": 9}}}
    questions = []
    for settings in ({}, {"seed": 1}, {"split": "test"}, {"seed": 1, "split": "test"}):
        values = _generator_settings(source(task, rows=50, **settings))
        with monkeypatch.context() as program:  # a process per setting would import reasoning-gym four times
            program.setattr(sys, "stdin", io.StringIO(json.dumps(values)))
            program.setattr(sys, "stdout", sys.stdout)  # the program replaces it
            generate_rows.main()
        lines = capsys.readouterr().out.splitlines()
        questions.append({json.loads(line)["prompt"][0]["content"] for line in lines})
    assert min(map(len, questions)) > 40  # few rows are equal by chance
    assert len(set.union(*questions)) == sum(map(len, questions))


def test_ranges_of_seeds_do_not_overlap() -> None:
    """A row's number is the seed of its source plus its index."""
    splits = [source(TASKS, seed=seed, split=split) for split in ("train", "test") for seed in (0, 1, 998, 999)]
    starts = [one.first_seed for one in splits]
    assert all(later - earlier >= 1_000_000 for earlier, later in pairwise(starts))
    assert starts[-1] + 1_000_000 <= 2**31


@pytest.mark.slow
def test_rows_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import sys; from tests.data.reading.test_generated_rows import HASH_DEPENDENT, source\n"
        "from flowrl.data.reading.generated_rows import generate_lines\n"
        "sys.stdout.buffer.write(b'\\n'.join(generate_lines(source(dict.fromkeys(HASH_DEPENDENT, 1)))))"
    )
    root = Path(__file__).parents[3]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (output,) = outputs
    assert len(output.splitlines()) == 8


@pytest.mark.slow
def test_chunks_have_the_number_of_their_first_row() -> None:
    chunks = list(read_chunks(source(TASKS), rows_per_chunk=3))
    assert [(chunk.first_line, len(chunk.rows)) for chunk in chunks] == [(1, 3), (4, 3), (7, 2)]


@pytest.mark.slow
def test_reading_may_stop_early() -> None:
    lines = generate_lines(source({"leg_counting": 1}, rows=1_000_000))
    assert json.loads(next(lines))["task"] == "leg_counting"
    lines.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(list(generate_lines(source(TASKS), 2))) == 2


def test_rows_of_an_epoch_are_counted_without_generating_them() -> None:
    assert count_rows(source({"no_such_task": 1}, weight=2.0)) == 16


@pytest.mark.parametrize(
    ("tasks", "facts"),
    [
        ({"leg_count": 1}, ["leg_count", "leg_counting"]),
        slow({"composite": 1}, ["composite"]),
        slow({"leg_counting": {"options": {"min_animal": 2}}}, ["reasoning_gym.leg_counting", "min_animal"]),
        slow({"leg_counting": {"options": {"min_animals": 5, "max_animals": 2}}}, ["reasoning_gym.leg_counting", 5, 2]),
        slow(
            {"leg_counting": {"options": {"min_animals": 500, "max_animals": 500}}},
            ["reasoning_gym.leg_counting", 0, 500],
        ),
    ],
)
def test_invalid_tasks_are_rejected(tasks: dict[str, Any], facts: list[object]) -> None:
    with pytest.raises(DataError) as caught:
        rows(tasks)
    assert all(str(fact) in str(caught.value) for fact in facts)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, ["path", "reasoning_gym"]),
        ({"path": "a.jsonl", "reasoning_gym": {"leg_counting": 1}}, ["path", "reasoning_gym"]),
        ({"path": "a.jsonl", "rows": 3}, ["rows", "a.jsonl"]),
        ({"reasoning_gym": {}}, ["reasoning_gym"]),
        ({"reasoning_gym": {"leg_counting": 0}}, ["reasoning_gym.leg_counting.weight"]),
        ({"reasoning_gym": {"leg_counting": 1}, "split": "validation"}, ["validation"]),
        ({"reasoning_gym": {"leg_counting": 1}, "subset": "main"}, ["subset"]),
        ({"reasoning_gym": {"leg_counting": 1}, "rows": 1_000_001}, ["rows"]),
        ({"reasoning_gym": {"leg_counting": {"options": {"seed": 1}}}}, ["seed"]),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], facts: list[str]) -> None:
    with rejects(*facts, error=ValueError):
        DataFile.model_validate(settings)
