"""The plain text and the Markdown of saved rows. The format is the feature."""

from pathlib import Path
from typing import Any

import pytest

from flowrl.config import RolloutLogConfig
from flowrl.report.rollout_log import COLUMNS, RolloutLog, Row
from flowrl.report.rollout_text import render_markdown, render_row, select_rows, show_rows
from tests.errors import rejects


def make_row(row: int, score: float | None = 1.0, **values: Any) -> Row:
    return (
        dict.fromkeys(COLUMNS)
        | {"step": 20, "row": row, "prompt": f"{row}+1=", "response": "2"}
        | values
        | {"score": score}
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two steps of training rows and one evaluation."""
    log = RolloutLog(tmp_path / "rollouts", RolloutLogConfig())
    log.write("training", 5, [make_row(0)])
    log.write("training", 20, [make_row(i, score) for i, score in ((0, 0.5), (8, 0.0), (16, 1.0), (24, 0.0))])
    log.write("evaluation", 10, [make_row(i, i / 20) for i in range(20)])
    return tmp_path


def indices(rows: list[Row]) -> list[int]:
    return [row["row"] for row in rows]


def test_rows_are_selected_by_score() -> None:
    rows = [make_row(i, score) for i, score in enumerate((0.5, 0.0, 1.0, 0.0, 1.0))]
    assert indices(select_rows(rows, "worst", 3)) == [1, 3, 0]
    assert indices(select_rows(rows, "best", 3)) == [2, 4, 0]
    assert indices(select_rows(rows, "row", 3)) == [0, 1, 2]
    assert indices(select_rows(rows, "worst", 99)) == [1, 3, 0, 2, 4]


def test_rows_whose_reward_failed_are_last() -> None:
    rows = [make_row(i, score) for i, score in enumerate((None, 0.5, None, 1.0))]
    assert indices(select_rows(rows, "worst", 3)) == [1, 3, 0]
    assert indices(select_rows(rows, "best", 9)) == [3, 1, 0, 2]


def test_rows_without_a_score_have_no_worst() -> None:
    with rejects("--worst", "--best"):
        select_rows([make_row(0, None)], "worst", 3)
    assert indices(select_rows([make_row(0, None)], "row", 3)) == [0]


def test_a_row_is_rendered_with_its_columns() -> None:
    row = make_row(
        3,
        0.25,
        answer=4,
        advantage=-0.5,
        version=19,
        finish_reason="stop",
        response_length=5,
        response="a\nb",
        other_scores={"shaped_scores": 0.125, "format": None},
    )
    assert render_row(row) == (
        "row 3: score 0.250, advantage -0.500, version 19, finish_reason stop, response_length 5, shaped_scores 0.125\n"
        "  prompt: 3+1=\n"
        "  response:\n"
        "    a\n"
        "    b\n"
        "  answer: 4"
    )


def test_a_row_has_a_line_per_failed_reward() -> None:
    row = make_row(0, 0.0, reward_failures={"style": "raised\nValueError \x1b", "size": "too late"})
    assert render_row(row).split("\n")[-2:] == [
        "  failed reward style: raised ValueError \\x1b",
        "  failed reward size: too late",
    ]


def test_columns_without_values_are_not_rendered() -> None:
    assert render_row(make_row(0, None)) == "row 0: \n  prompt: 0+1=\n  response: 2"


def test_markdown_shows_a_few_rows_as_code() -> None:
    text = render_markdown([make_row(i, response="# no heading\n\n**x**") for i in range(9)])
    assert text.count("score") == 3
    assert all(line.startswith("    ") for line in text.split("\n") if line)


def test_the_latest_step_is_the_default(run_folder: Path) -> None:
    text = show_rows(run_folder, step=None, kind="training", order="row", count=10)
    assert text.startswith(f"{run_folder}, step 20: 4 of 4 training rows, mean score 0.375\n\nrow 0: score 0.500\n")


def test_the_worst_rows_of_an_evaluation(run_folder: Path) -> None:
    text = show_rows(run_folder, step=10, kind="evaluation", order="worst", count=2)
    head, first, second = text.rstrip("\n").split("\n\n")
    assert head == f"{run_folder}, step 10: 2 of 20 evaluation rows, worst scores first, mean score 0.475"
    assert (first.split(":")[0], second.split(":")[0]) == ("row 0", "row 1")


def test_a_missing_run_is_rejected(tmp_path: Path) -> None:
    with rejects(tmp_path / "none"):
        show_rows(tmp_path / "none", step=None, kind="training", order="row", count=10)


def test_a_run_without_generated_text_is_rejected(tmp_path: Path) -> None:
    with rejects(tmp_path, "report.rollouts"):
        show_rows(tmp_path, step=None, kind="training", order="row", count=10)


def test_a_missing_step_is_rejected(run_folder: Path) -> None:
    with rejects(7, 5, 20):
        show_rows(run_folder, step=7, kind="training", order="row", count=10)


def test_names_of_rewards_are_shown_without_terminal_codes_and_line_breaks() -> None:
    codes = "\x1b]0;a\x07\u202e\x9b\r\n"
    row = make_row(0, None, reward_failures={f"a{codes}b": f"c{codes}d"}, other_scores={f"e{codes}f": 1.0})
    heading, _, _, failure = render_row(row).split("\n")
    for shown in (heading, failure):
        assert "\\x1b]0;a\\x07\\u202e\\x9b" in shown
        assert not {"\x1b", "\x07", "\u202e", "\x9b", "\r"} & set(shown)
