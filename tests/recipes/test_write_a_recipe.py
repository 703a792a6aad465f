"""The program and the config of docs/write_a_recipe.md, run as written."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import flowrl.config
from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import ConfigError, load
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings
from tests.errors import rejects
from tests.recipes.test_resume import from_step

PAGE = Path(__file__).parents[2] / "docs" / "write_a_recipe.md"


PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def import_program(name: str, program: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(tmp_path: Path) -> ModuleType:
    return import_program("documented_recipe", PROGRAMS[0], tmp_path)


def test_the_documented_config_reads_its_settings(tmp_path: Path) -> None:
    cls = import_program("documented_config", PROGRAMS[-1], tmp_path).MyConfig
    settings = grpo_settings(pairs="pairs.jsonl")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(settings))
    config = load(file, [], cls)
    assert (config.pairs, config.margin.value) == (Path("pairs.jsonl"), 0.1)
    assert load(file, ["margin.value=0.5"], cls).margin.value == 0.5
    assert load(file, ["margin.kind=none"], cls).margin.kind == "none"
    with rejects("margin.kind", "nome", "none", "fixed", error=ConfigError):
        load(file, ["margin.kind=nome"], cls)


def test_every_documented_field_type_is_exported() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## The config")[2]
    rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", section, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"\b[A-Z]\w*[a-z]\w*", row)} - {"Annotated"}
    assert {"FilePath", "ImportName", "OneOf"} <= names <= set(flowrl.config.__all__)


def test_the_documented_program_resumes_with_its_kl_coefficient(
    recipe: ModuleType, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    control = {"kind": "adaptive", "target": 1e-4, "horizon": 200}
    algorithm = {"estimator": "rloo", "kl_coef": 0.1, "kl_control": control}
    settings = {"algorithm": algorithm, "checkpoint": {"every": 2}, "batch_size": 16, "minibatch_size": 8}
    straight = grpo_config(**settings, steps=4, output=tmp_path / "straight")
    assert recipe.train(straight)["steps"] == 4
    resumed = from_step(straight, 2, tmp_path / "resumed")
    recipe.train(resumed)
    records = [
        [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
        for config in (straight, resumed)
    ]
    coefficients = [[record.get("kl_coef") for record in history] for history in records]
    assert coefficients[0] == coefficients[1] and len(set(coefficients[0][1:])) == 4
    rewards = [[record.get("reward") for record in history] for history in records]
    assert rewards[0] == rewards[1]
    states = [Checkpoints(c.output).read(4).driver()["objects"]["advantages"] for c in (straight, resumed)]
    assert states[0] == states[1]
