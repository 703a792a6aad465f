"""Runs whose processes are killed at random train every prompt once, or drop it with a counted reason.

`python -m tests.chaos.soak --steps 500` runs more steps (docs/failures.md).
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.chaos.soak import Scores, find_problems, soak

STEPS = 60


def rows(**scores: float) -> list[dict[str, Any]]:
    """Returns the rows of a step. `p3_1=0.5` is the score of sample 1 of prompt 3."""
    keys = [(name.removeprefix("p").split("_"), score) for name, score in scores.items()]
    return [{"prompt_id": int(prompt), "sample": int(sample), "score": score} for (prompt, sample), score in keys]


GOOD = {1: rows(p0_0=0, p0_1=1, p2_0=1, p2_3=0), 2: rows(p1_0=0, p1_1=1)}


def test_an_account_without_problems_has_none() -> None:
    assert find_problems(GOOD, 3, [], {"equal_scores": 0}) == []
    assert find_problems(GOOD, 6, [4], {"equal_scores": 1, "failed": 1}) == []


@pytest.mark.parametrize(
    ("step", "drawn", "pending", "num_dropped"),
    [
        (rows(p1_0=0, p1_1=1, p0_2=1), 3, [], 0),
        (rows(p1_0=0, p1_1=1) * 2, 3, [], 0),
        (rows(p1_0=1, p1_1=1), 3, [], 0),
        (rows(p1_0=0, p1_1=1, p3_0=0, p3_1=1), 3, [], 0),
        (GOOD[2], 3, [1], 0),
        (GOOD[2], 4, [], 0),
        (GOOD[2], 3, [], 1),
    ],
    ids=["two-steps", "repeated", "equal", "not-drawn", "pending", "lost", "counted-without-loss"],
)
def test_problems_are_found(step: list[dict[str, Any]], drawn: int, pending: list[int], num_dropped: int) -> None:
    assert len(find_problems(GOOD | {2: step}, drawn, pending, {"failed": num_dropped})) == 1


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, because Ray creates sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="sk", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scores", get_args(Scores))
def test_prompts_are_trained_once_or_dropped_with_a_counted_reason_despite_kills(folder: Path, scores: Scores) -> None:
    account = soak(folder, scores, STEPS)
    assert account.problems == []
    assert account.steps == STEPS and account.trained == account.drawn - sum(account.dropped.values())
    assert account.dropped["equal_scores"] > 0
    assert len(account.kills) == 3, "a kind of process was never killed"
