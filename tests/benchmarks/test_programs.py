"""Every program in tests/benchmarks runs. `tests/run_tests.sh --all benchmarks` runs this file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_OTHER_PROGRAMS = {"plain_steps", "trl_preferences", "trl_steps"}
"""Programs that another benchmark starts, with arguments that it creates."""

_FOLDER = Path(__file__).parent
PROGRAMS = {
    path.parent.name if path.name == "__main__.py" else path.stem: path
    for path in sorted([*_FOLDER.glob("*.py"), *_FOLDER.glob("*/__main__.py")])
    if not path.name.startswith("test_") and 'if __name__ == "__main__":' in path.read_text()
}
"""Name -> file of each program."""
TIMEOUT_S = 280.0
"""A smoke run takes 20 s on an idle machine, and 60 s with vLLM."""


@pytest.mark.slow
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in OF_OTHER_PROGRAMS])
def test_smallest_case_runs(program: str) -> None:
    command = [sys.executable, "-m", f"tests.benchmarks.{program}", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip(), "a benchmark prints its figures, or the reason for skipping them"


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in OF_OTHER_PROGRAMS])
def test_every_program_has_a_smoke_mode(program: str) -> None:
    """`read_arguments` adds the option `--smoke`."""
    tree = ast.parse(PROGRAMS[program].read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "read_arguments" in calls


def test_programs_of_other_programs_exist() -> None:
    assert set(PROGRAMS) >= OF_OTHER_PROGRAMS
