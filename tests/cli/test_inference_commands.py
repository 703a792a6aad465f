"""Errors of the commands that use a model appear before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr
from flowrl.cli import main
outcomes = []
for argv in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as printed:
        code = main(argv)
    imported = [name for name in ("torch", "ray", "transformers") if name in sys.modules]
    outcomes.append((code, imported, printed.getvalue()))
print(json.dumps(outcomes))
"""

COMMANDS = [
    (["generate", "model", "--prompts", "none.txt"], "none.txt"),
    (["generate", "model", "--prompts", "broken.jsonl"], "line 2"),
    (["generate", "model", "--prompts", "column.jsonl"], "'score'"),
    (["generate", "no/such/model", "--prompts", "prompts.txt"], "no/such/model"),
    (["generate", "model", "--prompts", "prompts.txt"], "config.json"),
    (["generate", "model", "--prompts", "prompts.txt", "--output", "prompts.txt"], "already exists"),
    (["generate", "model", "--prompts", "prompts.txt", "--best-of", "2"], "--reward"),
    (["generate", "model", "--prompts", "prompts.txt", "--samples", "2", "--temperature", "0"], "--samples"),
    (["generate", "model", "--prompts", "prompts.txt", "--stop", ""], "--stop"),
    (["chat", "no/such/model"], "no/such/model"),
    (["chat", "model", "--template", "none.json"], "none.json"),
    (["eval", "no/such/model"], "no/such/model"),
    (["serve", "model", "--api-key-file", "none.txt"], "none.txt"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[str], str]]:
    """Runs all commands in one process; returns exit codes, imported libraries and messages."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "model").mkdir()
    (folder / "prompts.txt").write_text("1+1=\n")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (folder / "column.jsonl").write_text(json.dumps({"prompt": "1+1=", "score": 1}) + "\n")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}"
    command = [sys.executable, "-c", program, json.dumps([argv for argv, _ in COMMANDS])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(COMMANDS)), ids=[" ".join(argv) for argv, _ in COMMANDS])
def test_a_wrong_argument_is_reported_before_torch_is_imported(
    outcomes: list[tuple[int, list[str], str]], index: int
) -> None:
    code, imported, message = outcomes[index]
    assert (code, imported) == (2, [])
    assert message.startswith("error: ") and message.count("\n") == 1 and COMMANDS[index][1] in message
