"""The programs of docs/environments.md run and print the output in their comments."""

import re
from pathlib import Path

import pytest
import yaml

from flowrl.environments.base import create_environment
from recipes.grpo.config import GRPOConfig

PAGE = Path(__file__).parents[2] / "docs/environments.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SETTINGS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


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


def test_the_settings_of_the_page_are_valid_and_create_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calculator.py").write_text(next(block for block in BLOCKS if "def multiply" in block))
    (block,) = SETTINGS
    settings = yaml.safe_load(block)
    settings["placement"] |= {"device": "cpu", "pools": {"main": [1]}}
    others = {
        "output": "run", "steps": 1, "batch_size": 4, "minibatch_size": 4, "samples_per_prompt": 2,
        "actor": {"model": {"path": "model"}, "optimizer": {"lr": 1e-4}}, "algorithm": {"estimator": "grpo"},
        "reference": {"model": {"path": "model"}}, "data": {"train": "rows.jsonl", "max_prompt_tokens": 512},
    }  # fmt: skip
    config = GRPOConfig.model_validate(others | settings)
    assert config.environment is not None and config.environment.workers == 2
    environment = create_environment(config.environment.name, config.environment.options)
    assert [tool["function"]["name"] for tool in environment.tools] == ["multiply"]
