"""The output of programs in a file has the lines that the program wrote, and no control characters of a model."""

import os
import subprocess
import sys

import pytest

from flowrl.data.console import printable

PROGRAM = "from flowrl.data.console import make_console; make_console().print('word ' * 100)"


def output_lines(environment: dict[str, str]) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


def test_lines_are_not_wrapped_in_a_file():
    assert [line.split() for line in output_lines({})] == [["word"] * 100]


def test_columns_sets_the_width():
    assert max(map(len, output_lines({"COLUMNS": "60"}))) <= 60


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x07é\u202e", "a\\rb\\x07é\\u202e"),
        ("\ud800", "\\ud800"),
        ("数学\u3000é\t👍", None),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)
