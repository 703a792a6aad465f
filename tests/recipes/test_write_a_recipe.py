"""The program of docs/write_a_recipe.md, run as written."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints
from recipes.grpo.config import GRPOConfig

PAGE = Path(__file__).parents[2] / "docs" / "write_a_recipe.md"


@pytest.fixture
def recipe(tmp_path: Path) -> ModuleType:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    path = tmp_path / "documented_recipe.py"
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("documented_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_program_resumes_with_its_kl_coefficient(
    recipe: ModuleType, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    control = {"kind": "adaptive", "target": 1e-4, "horizon": 200}
    algorithm = {"estimator": "rloo", "kl_coef": 0.1, "kl_control": control}
    settings = {"algorithm": algorithm, "checkpoint": {"every": 2}, "report": {"plots": False, "tensorboard": False}}
    straight = grpo_config(**settings, steps=4, output=tmp_path / "straight")
    first = grpo_config(**settings, steps=2, output=tmp_path / "resumed")
    assert recipe.train(straight)["steps"] == 4
    recipe.train(first)
    recipe.train(first.model_copy(update={"steps": 4, "resume": "auto"}))
    records = [
        [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
        for config in (straight, first)
    ]
    coefficients = [[record.get("kl_coef") for record in history] for history in records]
    assert coefficients[0] == coefficients[1] and len(set(coefficients[0][1:])) == 4
    rewards = [[record.get("reward") for record in history] for history in records]
    assert rewards[0] == rewards[1]
    states = [Checkpoints(c.output).read(4).driver()["objects"]["advantages"] for c in (straight, first)]
    assert states[0] == states[1]
