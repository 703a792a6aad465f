"""docs/extend.md: its examples run as they are written."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from flowrl.cli import main, run_recipe
from flowrl.config.engines.rollout_engines import EngineCapabilities
from flowrl.engines.rollout.base import check_engine_class
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import quickstart_settings
from tests.errors import missing_facts
from tests.recipes.test_environments import TOGETHER, environment

PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text(encoding="utf-8")
FLAGS = re.DOTALL | re.MULTILINE


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writes all Python examples of the page into modules."""
    examples = {name: text for text, name in re.findall(r"^```python\n(# (\w+)\.py\n.*?)^```$", PAGE, FLAGS)}
    for name, text in examples.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in examples:
        sys.modules.pop(name, None)


@pytest.fixture
def example() -> Callable[[str], str]:
    """Returns a function that returns the value of a setting in the page, which names one of the examples."""

    def find(setting: str) -> str:
        (reference,) = re.findall(rf"^  {setting}: (\S+)$", PAGE, re.MULTILINE)
        return reference

    return find


def test_the_example_of_a_rollout_engine_trains_and_matches_the_trainer(
    example: Callable[[str], str], grpo_config: Callable[..., GRPOConfig]
) -> None:
    engine = example("engine")
    check_engine_class(engine)
    rollout = {"engine": engine, "max_response_tokens": 6, "check": "strict"}
    config = grpo_config(rollout=rollout, steps=2, evaluate_every=0)
    # The gap is the difference to log-probabilities of the trainer.
    actor = config.actor.model_copy(update={"old_logprobs": "recompute"})
    train(config.model_copy(update={"actor": actor}))
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert all(line["rollout_gap"] < 1e-5 for line in lines if "rollout_gap" in line)
    assert sum("rollout_gap" in line for line in lines) == 2


@pytest.mark.slow
def test_the_example_of_an_engine_continues_responses(
    example: Callable[[str], str], grpo_config: Callable[..., GRPOConfig]
) -> None:
    rollout = {"engine": example("engine"), "max_response_tokens": 24, "check": "strict"}
    actor = grpo_config().actor.model_dump() | {"old_logprobs": "recompute"}
    turns = environment("TwoTurns") | {"placement": TOGETHER}
    config = grpo_config(rollout=rollout, steps=2, evaluate_every=0, actor=actor, **turns)
    train(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("environment_length", 0) > 0 for line in lines)
    gaps = [line["rollout_gap"] for line in lines if "rollout_gap" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-5


def test_every_capability_is_documented() -> None:
    table = PAGE[PAGE.index("| capability |") : PAGE.index("**Requests.**")]
    documented = set(re.findall(r"`(\w+)(?:: \w+)?`", table))
    assert {field.name for field in fields(EngineCapabilities)} - {"settings"} <= documented


@pytest.fixture
def recipe_file(task_folder: Path, tmp_path: Path) -> Path:
    """Writes the YAML file of the recipe with its own role, with the files and sizes of a small run."""
    (example,) = re.findall(r"^```yaml\n# my\.yaml\n(.*?)^```$", PAGE, FLAGS)
    files = {"train": "train.jsonl", "tests": {"easy": "test.jsonl", "hard": "test.jsonl"}}
    settings = quickstart_settings(Path(), Path("run"), steps=2, algorithm={"estimator": "rloo"})
    settings["data"] |= files | {"test": None}
    settings["actor"]["model"]["path"] = "model"
    settings["reward"] = {"function": "recipes.quickstart.task:score"}
    del settings["reference"]
    plain = json.loads(json.dumps(settings | {"evaluate_every": 1}, default=str))
    for name in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / name).symlink_to(task_folder / name)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(plain | yaml.safe_load(example)))
    return tmp_path / "my.yaml"


def test_the_example_of_a_recipe_trains_with_its_role_its_loss_and_its_evaluation(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recipe_file.parent)
    assert main(["plan", str(recipe_file)]) == 0
    plan = capsys.readouterr().out
    assert "judge" in plan and "reference" not in plan
    recipe = importlib.import_module("my_recipe")
    assert run_recipe(recipe.MyConfig, recipe.train, [str(recipe_file)]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert not record["step"] or (record["actor/imitation/loss"] > 0 and record["actor/entropy"] > 0)
        for name in ("easy", "hard"):
            assert 0 <= record[f"mean@4/{name}"] <= record[f"best@4/{name}"] <= 1


def test_a_placement_without_the_role_of_the_example_is_rejected_before_the_start(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recipe_file.parent)
    recipe = importlib.import_module("my_recipe")
    roles = "placement.roles={actor: main, rollout: main, reward: main}"
    for run in (lambda words: main(["plan", *words]), lambda words: run_recipe(recipe.MyConfig, recipe.train, words)):
        assert run([str(recipe_file), roles]) == 2
        error = capsys.readouterr().err
        assert not missing_facts(error, "placement.roles.judge", "main") and error.count("\n") == 1
    assert not Path("run").exists()
