"""Errors, warnings and foreign text have one form in the output of every program, without terminal codes."""

import logging
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from flowrl.cli import exit_code, main, run_recipe
from flowrl.config import CheckFailed, UserError
from flowrl.controller.errors import WorkerError
from flowrl.data.console import make_console, write_printable
from flowrl.report.trackers.tensorboard_tracker import EventFile
from recipes.ppo.config import PPOConfig
from tests.errors import missing_facts

FOREIGN = "\x1b]0;title\x07 \u202e \x9b31m\r\nerror: forged"
ESCAPED = "\\x1b]0;title\\x07 \\u202e \\x9b31m\\r\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError(FOREIGN), 2), (WorkerError("reward", 0, 0, "score", FOREIGN), 1), (CheckFailed(FOREIGN), 1)],
)
def test_errors_are_printed_without_terminal_codes(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        raise error

    assert exit_code(program) == code
    assert ESCAPED in capsys.readouterr().err


def test_a_line_break_in_the_error_of_a_worker_does_not_begin_a_line_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def program() -> None:
        raise WorkerError("reward", 0, 0, "score", FOREIGN)

    exit_code(program)
    assert capsys.readouterr().err.count("\nerror:") == 0


def test_warnings_of_any_logger_are_printed_with_a_prefix_and_without_terminal_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    assert exit_code(lambda: logging.getLogger("my_recipe").warning("%d rows of %s", 3, "a\x9b")) == 0
    assert capsys.readouterr().err == "warning: 3 rows of a\\x9b\n"


def test_foreign_text_is_printed_without_terminal_codes_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = make_console()
    console.print(Text(FOREIGN))
    table = Table()
    table.add_column("")
    table.add_row(Text("\x9b31m"))
    console.print(table)
    write_printable("a\udcffb\x9b31m")
    shown = capsys.readouterr().out
    assert "\\x1b]0;title" in shown and "a\\udcffb" in shown
    assert not {"\x1b", "\x07", "\u202e", "\x9b", "\r"} & set(shown)


@pytest.mark.parametrize("argv", [["show", "a" * 300], ["show", "b/" * 5000], ["report", "a" * 300]])
def test_a_path_that_is_too_long_is_rejected(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and argv[1][:100] in error


def test_an_argument_that_is_not_utf8_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (lambda: main(["show", "a\udcff"]), lambda: run_recipe(PPOConfig, "train:run", ["output=\udcff"])):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2 and "\\udcff" in capsys.readouterr().err


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").touch()
    assert exit_code(lambda: EventFile(tmp_path / "tensorboard")) == 2
    assert not missing_facts(capsys.readouterr().err, tmp_path / "tensorboard")
