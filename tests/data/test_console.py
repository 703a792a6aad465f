"""The output of programs in a file has the lines that the program wrote."""

import os
import subprocess
import sys

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
