"""The YAML file that `flowrl config` prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.cli.imports import included_recipes
from flowrl.config import ConfigError, RoleConfig, load
from flowrl.config.rewards.reward_settings import RewardSource
from flowrl.config.run import RunConfig
from flowrl.config.setting_template import render_template
from flowrl.config.setting_tree import setting_paths
from tests.errors import facts_of, rejects

COMMON = {
    "output": "out", "steps": 3, "batch_size": 8, "minibatch_size": 4, "samples_per_prompt": 2,
    "actor.model.path": "m", "actor.optimizer.lr": 1.5e-4,
    "reward.function": "rewards:score", "rollout.max_response_tokens": 8,
    "data.train": "train.jsonl", "data.max_prompt_tokens": 16,
}  # fmt: skip
STAGE = {key: COMMON[key] for key in ("output", "steps", "batch_size", "data.train", "data.max_prompt_tokens")}
REQUIRED: dict[str, dict[str, Any]] = {
    "grpo": COMMON | {"algorithm.estimator": "grpo"},
    "ppo": COMMON | {"algorithm.estimator": "gae", "critic.model.path": "m", "critic.optimizer.lr": 1e-3},
    "rejection_sampling": COMMON,
    "distillation": {name: COMMON[name] for name in COMMON if name != "reward.function"} | {"teacher.model.path": "m"},
    "dpo": STAGE | {"actor.model.path": "m", "actor.optimizer.lr": 1e-3},
    "reward_model": STAGE | {"reward.model.path": "m", "reward.optimizer.lr": 1e-3},
    "sft": STAGE | {"actor.model.path": "m", "actor.optimizer.lr": 1e-3},
}  # fmt: skip
"""Recipe -> values of its required settings."""


@pytest.mark.parametrize("recipe", included_recipes())
def test_a_template_loads_with_its_required_values_and_has_the_defaults(recipe: str, tmp_path: Path) -> None:
    cls = included_recipes()[recipe]
    path, minimal = tmp_path / "template.yaml", tmp_path / "minimal.yaml"
    path.write_text(render_template(cls))
    minimal.write_text("{}")
    overrides = [f"{key}={value}" for key, value in REQUIRED[recipe].items()]
    config = load(path, overrides, cls)
    assert config.recipe == f"{cls.__module__}:{cls.__qualname__}"
    expected = load(minimal, overrides, cls)
    assert set(config.placement.roles) == set(cls.possible_roles())
    assert config.model_copy(update={"placement": expected.placement}) == expected


@pytest.mark.parametrize("recipe", included_recipes())
def test_exactly_the_required_settings_are_marked_and_have_no_value(recipe: str, tmp_path: Path) -> None:
    cls = included_recipes()[recipe]
    path = tmp_path / "template.yaml"
    path.write_text(render_template(cls))
    lines = path.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if re.match(r" *\w+:  # required", line)}
    samples = {"samples_per_prompt"}
    is_defaulted = {"grpo": set(), "rejection_sampling": set(), "ppo": samples, "distillation": samples}.get(
        recipe,
        {"steps"},  # or epochs
    )
    assert len(marked) == len(REQUIRED[recipe].keys() - is_defaulted)
    with rejects(error=ConfigError) as caught:
        load(path, [], cls)
    reported = {int(fact.rpartition(":")[2]) for fact in facts_of(str(caught.value)) if fact.startswith(f"{path}:")}
    assert reported == marked


@pytest.mark.parametrize("recipe", included_recipes())
def test_every_setting_is_in_the_template_or_in_its_comments(recipe: str) -> None:
    cls = included_recipes()[recipe]
    text = render_template(cls)
    names = {path.rpartition(".")[2] for path in setting_paths(cls) if not path.startswith("placement.")}
    assert {name for name in names if not re.search(rf"\b{name}:?", text)} == set()


def test_a_setting_with_an_alternative_is_required_unless_the_alternative_is_set() -> None:
    (line,) = re.findall(r"^  function:.*", render_template(included_recipes()["grpo"]), re.MULTILINE)
    alternatives = "model, judge, service or components"
    assert re.fullmatch(rf"  function:  # required unless {alternatives} is set \(module:name\)", line)


def test_the_settings_of_the_groups_in_a_list_are_in_a_comment() -> None:
    text = render_template(included_recipes()["grpo"])
    block = text[text.index("# Several rewards.") : text.index("  components: null")]
    words = " ".join(block.replace("#", " ").split())
    assert "A group has name: (required), weight: 1.0, data_sources: null" in words
    assert set(RewardSource.model_fields) <= set(re.findall(r"\w+", words))


def test_a_group_of_several_roles_is_explained_once() -> None:
    text = render_template(included_recipes()["ppo"])
    assert text.count("max_tokens_per_microbatch:") == 1
    settings = yaml.safe_load(text)
    assert settings["critic"]["engine"] == {} and settings["critic"]["model"] == {"path": None}


@pytest.mark.parametrize("recipe", included_recipes())
def test_comments_fit_on_a_line(recipe: str) -> None:
    lines = render_template(included_recipes()[recipe]).splitlines()
    assert [line for line in lines if len(line) > 120] == []


def test_a_group_without_a_value_can_be_uncommented(tmp_path: Path) -> None:
    text = render_template(included_recipes()["sft"])
    (block,) = re.findall(r"^  lora: null\n((?:^  # (?:lora:|  ).*\n)+)", text, re.MULTILINE)
    path = tmp_path / "lora.yaml"
    path.write_text(text.replace("  lora: null\n" + block, re.sub(r"^  # ", "  ", block, flags=re.MULTILINE)))
    overrides = [f"{key}={value}" for key, value in REQUIRED["sft"].items()]
    lora = dict(load(path, [*overrides, "actor.lora.rank=4"], included_recipes()["sft"]))["actor"].lora
    assert lora.rank == 4 and lora.targets == "all_linear"


class OwnConfig(RunConfig):
    """A recipe with one role."""

    judge: RoleConfig = RoleConfig()

    limit: float = 0.5
    """Limit of the score."""


def test_the_recipe_of_a_user_has_a_template(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(render_template(OwnConfig))
    config = load(path, ["output=o", "steps=1", "limit=0.25"], OwnConfig)
    assert config.limit == 0.25 and set(config.placement.roles) == {"judge"}
    assert "Limit of the score." in path.read_text()
