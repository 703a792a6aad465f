"""The program and the config of docs/write_a_recipe.md, run as written."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest
import yaml

import flowrl.config
from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import ConfigError, UserError, load
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings
from tests.errors import rejects
from tests.recipes.rollout_configs import SCHEDULES, detached
from tests.recipes.test_numbers import metrics_of
from tests.recipes.test_old_logprobs import is_clock
from tests.recipes.test_resume import from_step
from tests.slow_cases import as_parameters

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


@pytest.fixture
def scoring_recipe(tmp_path: Path) -> ModuleType:
    """Returns the recipe that computes scores in its loop."""
    scores, own = (next(p for p in PROGRAMS if text in p) for text in ("reward.score", "run_recipe"))
    first_line = next(line for line in own.splitlines(keepends=True) if "in run.rollouts(" in line)
    return import_program("scoring_recipe", own.replace(first_line, indent(scores, " " * 8)), tmp_path)


@pytest.mark.parametrize("schedule", as_parameters(SCHEDULES, "sync"))
def test_scores_that_the_loop_computes_are_those_of_run_rollouts(
    recipe: ModuleType, scoring_recipe: ModuleType, grpo_config: Callable[..., GRPOConfig], schedule: str
) -> None:
    config = grpo_config(schedule=SCHEDULES[schedule], placement=detached("reference", "reward"), steps=2)
    histories = []
    for module in (recipe, scoring_recipe):
        own = config.model_copy(update={"output": config.output / module.__name__})
        module.train(own)
        histories.append(metrics_of(own))
    for history in histories:
        for record in history:
            for name in list(record):
                if is_clock(name) or (name.startswith("rewards/") and name.endswith("/seconds")):
                    del record[name]
    assert histories[0] == histories[1] and {"reward", "reward_failed_fraction"} <= histories[0][-1].keys()


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"dynamic_sampling": {"max_rounds": 2}}, "dynamic_sampling"),
        ({"reward": {"function": "recipes.quickstart.task:score", "on_failure": "drop"}}, "on_failure"),
        ({"order": "curriculum"}, "data.order"),
        ({"difficulty": {"min": 0.1}}, "data.difficulty"),
    ],
)
def test_scores_that_the_loop_computes_select_no_rows_and_no_prompts(
    scoring_recipe: ModuleType, grpo_config: Callable[..., GRPOConfig], change: dict[str, Any], setting: str
) -> None:
    data = {name: value for name, value in change.items() if name in ("order", "difficulty")}
    own = grpo_config().data.model_dump(exclude_defaults=True)
    with rejects(setting, "run.rollouts", error=UserError):
        scoring_recipe.train(grpo_config(**({"data": own | data} if data else change)))


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
