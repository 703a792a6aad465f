"""Errors of the commands that use a model appear before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from flowrl.cli import main
code = main(sys.argv[1:])
print(code, [name for name in ("torch", "ray", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_reported_before_torch_is_imported(tmp_path: Path, argv: list[str], fact: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.txt").write_text("1+1=\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (tmp_path / "column.jsonl").write_text(json.dumps({"prompt": "1+1=", "score": 1}) + "\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}", *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "2 []\n", done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and fact in done.stderr
