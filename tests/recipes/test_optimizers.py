"""Every recipe trains with every optimizer, resumes exactly, exports, and reports the rates of weight groups."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.cli import main
from flowrl.config import Placement
from flowrl.run.checks.check_list import check_start
from recipes.dpo.train import train as train_dpo
from recipes.grpo.train import train as train_grpo
from recipes.ppo.train import train as train_ppo
from recipes.reward_model.train import train as train_reward_model
from recipes.sft.train import train as train_sft
from tests.errors import rejects
from tests.recipes.conftest import build_grpo_config, build_ppo_config
from tests.recipes.preference_configs import dpo_config, reward_model_config, write_few_pairs
from tests.recipes.test_numbers import ROLES
from tests.recipes.test_sft import sft_config

KINDS = [
    "muon",
    pytest.param(
        "adamw_8bit",
        marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, of the extra optimizers"),
    ),
]


@pytest.fixture(scope="module")
def task(task_folder: Path) -> Path:
    write_few_pairs(task_folder)
    return task_folder


def trained_model(recipe: str, task: Path, output: Path, settings: dict[str, Any], **changes: Any) -> Path:
    """Runs a recipe whose trained roles have these settings, and returns the folder of its output."""
    role = {"model": {"path": task / "model"}, "optimizer": {"lr": 1e-3}} | settings
    if recipe == "ppo":
        train_ppo(build_ppo_config(task, output, actor=role, critic=role, **changes))
    elif recipe == "grpo":
        train_grpo(build_grpo_config(task, output, actor=role, **changes))
    elif recipe == "sft":
        train_sft(sft_config(task, output=output, actor=role, **changes))
    elif recipe == "dpo":
        train_dpo(dpo_config(task, output, actor=role, **changes))
    else:
        train_reward_model(reward_model_config(task, output, reward=role, **changes))
    return output


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_resume(recipe: str, task: Path, folder: Path, settings: dict[str, Any], **changes: Any) -> None:
    """Checks that a run that continues from its second step has the weights of an uninterrupted one, which are also
    those of its export. The first is in the folder `again`.
    """
    straight = trained_model(recipe, task, folder / "straight", settings, steps=3, checkpoint={"every": 3}, **changes)
    changes |= {"checkpoint": {"every": 1}}
    trained_model(recipe, task, folder / "again", settings, steps=2, **changes)
    again = trained_model(recipe, task, folder / "again", settings, steps=3, resume="auto", **changes)
    expected, actual = weights_in(straight / "model"), weights_in(again / "model")
    assert expected.keys() == actual.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    start = weights_in(task / "model")
    assert any(not torch.equal(expected[name], start[name]) for name in expected.keys() & start.keys())
    assert main(["export", str(again), "--output", str(folder / "exported")]) == 0
    exported = weights_in(folder / "exported")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["ppo", "grpo", "sft", "dpo", "reward_model"])
def test_a_resumed_run_equals_an_uninterrupted_one(task: Path, tmp_path: Path, recipe: str, kind: str) -> None:
    check_resume(recipe, task, tmp_path, {"optimizer": {"lr": 1e-3, "kind": kind, "weight_decay": 0.1}})


@pytest.mark.slow
def test_zero1_trains_saves_and_resumes_as_ddp(ray_session: None, task: Path, tmp_path: Path) -> None:
    folders = []
    for strategy in ("ddp", "zero1"):
        role = {
            "model": {"path": task / "model"},
            "optimizer": {"lr": 1e-3},
            "engine": {"strategy": strategy},
        }
        changes: dict[str, Any] = {
            "actor": role,
            "critic": role,
            "backend": "ray",
            "placement": Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main")),
            "checkpoint": {"every": 1},
        }
        output = tmp_path / strategy
        train_ppo(build_ppo_config(task, output, steps=2, **changes))
        train_ppo(build_ppo_config(task, output, steps=3, resume="auto", **changes))
        folders.append(output / "model")
    ddp, zero1 = map(weights_in, folders)
    assert ddp.keys() == zero1.keys() and all(torch.equal(zero1[name], ddp[name]) for name in ddp)


def test_a_critic_trains_its_head_with_its_own_rate(task: Path, tmp_path: Path) -> None:
    critic = {
        "model": {"path": task / "model"},
        "optimizer": {
            "lr": 1e-3,
            "min_lr": 5e-4,
            "schedule": "linear",
            "groups": {"head": {"weights": ["value_head.*"], "lr": 1e-2}},
        },
    }
    config = build_ppo_config(task, tmp_path / "run", critic=critic, steps=2, minibatch_size=32)
    train_ppo(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    rates = [(line["critic/lr"], line["critic/lr/head"]) for line in lines if "critic/lr" in line]
    assert rates == [pytest.approx((1e-3, 1e-2)), pytest.approx((7.5e-4, 7.5e-3))]


def test_a_group_without_weights_is_rejected_before_the_start(task: Path, tmp_path: Path) -> None:
    groups = {"head": {"weights": ["value_head.*"], "lr": 1e-2}}
    role = {"model": {"path": task / "model"}, "optimizer": {"lr": 1e-3, "groups": groups}}
    with rejects("actor.optimizer.groups.head.weights", "value_head", "model.embed_tokens.weight"):
        check_start(build_ppo_config(task, tmp_path / "run", actor=role))
    assert not (tmp_path / "run").exists()
