"""The programs in docs/controller.md and docs/failures.md run and print what their comments say."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["controller.md", "failures.md"])
def test_the_program_of_a_page_prints_the_documented_output(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    (expected,) = re.findall(r"print\(.*  # (.*)", program)
    assert capsys.readouterr().out.strip() == expected
