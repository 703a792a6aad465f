"""The commands of docs/inference.md, and its table of columns."""

import json
import re
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.inference.chat_terminal import HELP
from flowrl.inference.generation_settings import OUTPUT_COLUMNS

PAGE = (Path(__file__).parents[2] / "docs/inference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", re.findall(r"^flowrl generate (.*)$", PAGE, re.MULTILINE))
def test_the_documented_commands_run(
    command: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(run_folder)
    (tmp_path / "prompts.txt").write_text("1+1=\n2+2=\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "my_rewards.py").write_text("def score(response, answer):\n    return float(response == answer)\n")
    assert main(["generate", *command.split(), "--max-tokens", "6"]) == 0
    for path in tmp_path.glob("*.jsonl"):
        assert path.name == "prompts.jsonl" or all(map(json.loads, path.read_text().splitlines()))


def test_every_column_of_the_output_and_every_command_of_the_chat_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", PAGE.partition("**Output.**")[2].partition("**Sampling.**")[0]))
    assert documented >= OUTPUT_COLUMNS
    commands = set(re.findall(r"^/(\w+)", HELP, re.MULTILINE))
    chat = PAGE.partition("## Chat")[2].partition("\n## ")[0]
    assert set(re.findall(r"`/(\w+)", chat)) == commands
