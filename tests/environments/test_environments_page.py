"""The programs of docs/environments.md run and print the output in their comments."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/environments.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_programs_of_the_page_print_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    (tmp_path / "guess_number.py").write_text(next(block for block in BLOCKS if "class GuessNumber" in block))
    (tmp_path / "calculator.py").write_text(next(block for block in BLOCKS if "def multiply" in block))
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
        expected = re.findall(r"^# (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == expected


def test_the_page_has_programs_with_output() -> None:
    assert sum(bool(re.search(r"^# ", block, re.MULTILINE)) for block in BLOCKS) == 3
