"""The examples of the first sections of docs/rewards.md, before those about judges, run with their results."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.config import Placement, RewardComponent, RewardConfig
from flowrl.config.stages.rollouts import DynamicSampling
from flowrl.rewards.row_scorer import RowScorer
from flowrl.run.checks.config_checks import check_functions
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings, plan_run

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
SECTIONS = PAGE.partition("## Included reward functions")[0]
SERVICES = PAGE.partition("## Services")[2].partition("\n## ")[0]


def blocks(language: str, text: str = SECTIONS) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with the functions of the page."""
    (code,) = blocks("python")
    name = f"documented_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return name


def settings(index: int, module: str) -> dict[str, Any]:
    return yaml.safe_load(blocks("yaml")[index].replace("my_rewards:", f"{module}:"))


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(grpo_settings(**changes))


@pytest.mark.parametrize("index", range(len(blocks("yaml"))))
def test_the_settings_of_the_page_are_valid(index: int, module: str) -> None:
    check_functions(config(**{"reward": {"function": f"{module}:exact"}} | settings(index, module)))


def test_the_settings_of_a_service_are_valid() -> None:
    (example,) = blocks("yaml", SERVICES)
    reward = config(**yaml.safe_load(example)).reward
    assert reward is not None and reward.service is not None and reward.service.batch_size == 32


def score(reward: RewardConfig, row: dict[str, Any]) -> dict[str, float]:
    with closing(RowScorer(reward, workers=1)) as scorer:
        return dict(scorer.submit(row).result(60).values)


def test_the_rewards_of_the_list_have_the_documented_scores(module: str) -> None:
    reward = config(**settings(1, module)).reward
    assert reward is not None
    row = {
        "prompt": "1 + 1",
        "conversation": [{"role": "user", "content": "1 + 1"}],
        "response": "1 + 2",
        "token_ids": [5] * 33,
        "finish_reason": "stop",
        "answer": "1 + 2",
    }
    # Words in common: 1 and + of 1, + and 2. 33 tokens exceed the limit of 32. The text has 5 characters.
    scores = score(reward, row | {"data_source": "math"})
    copies, size = pytest.approx(2 / 3), pytest.approx(0.05)
    assert scores == {"task": 1.0, "copies": copies, "brief": 0.0, "size": size, "scores": pytest.approx(1 - 1 / 3)}
    others = score(reward, row | {"data_source": "code", "token_ids": [5] * 32})
    assert others.pop("task") != 1.0
    assert others == {"copies": copies, "brief": 1.0, "size": size, "scores": pytest.approx(0.1 - 1 / 3)}


def test_the_tables_of_settings_have_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", SECTIONS, re.MULTILINE)
    fields = RewardConfig.model_fields | DynamicSampling.model_fields
    assert {name: yaml.safe_load(default.strip("`")) for name, default in rows} == {
        name: fields[name].default for name, _ in rows
    }
    own = RewardConfig.model_fields.keys() - RewardComponent.model_fields.keys() - {"components", "evaluation"}
    assert {name for name, _ in rows} == own | DynamicSampling.model_fields.keys()


def test_the_placement_of_the_page_has_the_roles_of_the_rewards(module: str) -> None:
    (index,) = (i for i, block in enumerate(blocks("yaml")) if "placement:" in block)
    documented = settings(index, module)
    planned = config(**documented, algorithm={"estimator": "grpo"}, reference=None)
    assert isinstance(planned.placement, Placement)
    assert set(plan_run(planned).roles) == set(documented["placement"]["roles"])
