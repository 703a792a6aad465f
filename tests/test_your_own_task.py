"""docs/your_own_task.md: its files and commands run as they are written."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.rewards.reward_function import load_reward_function
from flowrl.run.checks.check_list import ROWS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/your_own_task.md").read_text(encoding="utf-8")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the files of the page into a directory, and makes it the working directory."""
    files = re.findall(r"^```(?:python|yaml)\n(# (\S+)\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert {name for _, name in files} >= {"make_data.py", "make_model.py", "my_reward.py", "task.yaml"}
    for text, name in files:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[str]:
    """Returns the commands of the page, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(command: str, folder: Path) -> str:
    """Runs a command of the page in its directory, with the Python of the tests, and returns its output."""
    words = command.split()
    program = [sys.executable, "-m", "flowrl.cli", *words[1:]] if words[0] == "flowrl" else [sys.executable, *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_the_files_of_the_page_pass_all_checks(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(task))
    for name in ("make_data", "make_model"):
        exec(compile((task / f"{name}.py").read_text(), name, "exec"), {})
    importlib.invalidate_caches()
    before = sorted(task.iterdir())
    try:
        assert main(["check", "task.yaml"]) == 0
        exact = load_reward_function("my_reward:exact")
    finally:
        sys.modules.pop("my_reward", None)
    assert sorted(path for path in task.iterdir() if path.name != "__pycache__") == before
    lines = (re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    states = {cells[0]: cells[1] for cells in lines if cells[0] in ROWS}
    assert states == dict.fromkeys(ROWS, "ok")
    assert (exact(prompt="3 8", response="8", answer="8"), exact(prompt="3 8", response="88", answer="8")) == (1, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_train_a_model(task: Path) -> None:
    outputs = {command: run(command, task) for command in [*commands(), "python use_model.py"]}
    assert [command for command in outputs if command.startswith("flowrl show")] and outputs["flowrl check task.yaml"]
    summary = json.loads((task / "run/summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"]
    assert (task / "run/trace.json").is_file()
    assert len(re.findall("response: ", outputs["flowrl show run --evaluation --worst 5"])) == 5
    assert re.fullmatch(r"\d+", outputs["python use_model.py"].strip())
