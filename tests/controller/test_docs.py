"""The programs in docs/controller.md and docs/failures.md run and print the output in their comments."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "index"), [("controller.md", 0), ("controller.md", 1), ("failures.md", 0)])
def test_a_program_of_a_page_prints_the_documented_output(
    page: str, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[index]
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    (expected,) = re.findall(r"print\(.*  # (.*)", program)
    assert capsys.readouterr().out.strip() == expected
