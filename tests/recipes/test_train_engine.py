"""The shipped recipes have the same metrics as pipelines: with a user's training engine, and with the included one."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import ConfigError, ModelConfig, RunConfig
from flowrl.engines.checkpoint.export import export_model
from flowrl.engines.models.loading import load_policy
from flowrl.run.checks.check_list import check_start
from recipes.dpo.config import DPOConfig
from recipes.dpo.train import train as train_dpo
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import with_float64_models
from tests.engines.train.pipeline_ranks import PIPELINE
from tests.errors import rejects
from tests.recipes.conftest import build_grpo_config, build_ppo_config
from tests.recipes.preference_configs import preference_settings, write_few_pairs
from tests.recipes.test_numbers import ROLES, assert_same, metrics_of, sft_config

TRAIN: dict[type[RunConfig], Callable[..., Any]] = {
    PPOConfig: train_ppo,
    GRPOConfig: train_grpo,
    SFTConfig: train_sft,
    DPOConfig: train_dpo,
}
RECIPES = ["ppo", "grpo", "sft", "dpo"]


@pytest.fixture(scope="module")
def tied(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the task with pairs. Its model has tied embeddings."""
    folder = tmp_path_factory.mktemp("tied") / "data"
    shutil.copytree(task_folder, folder)
    write_few_pairs(folder)
    return folder


@pytest.fixture(scope="module")
def task(task_folder: Path, tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the task with pairs, and with a model whose input and output embeddings are separate."""
    folder = tmp_path_factory.mktemp("untied") / "data"
    shutil.copytree(tied, folder)
    model = load_policy(ModelConfig(path=task_folder / "model"))
    weights = model.state_dict() | {"lm_head.weight": model.lm_head.weight.detach().clone()}
    model.config.tie_word_embeddings = False
    for name in ("model.safetensors", "config.json"):
        (folder / "model" / name).unlink()
    model.save_pretrained(folder / "model", state_dict=weights)
    return folder


def build(recipe: str, task: Path, output: Path, **changes: Any) -> RunConfig:
    """Returns the float64 config of a recipe with two checkpoints."""
    changes = {"checkpoint": {"every": 2}} | changes
    if recipe == "ppo":
        return with_float64_models(build_ppo_config(task, output, **changes))
    if recipe == "grpo":
        return with_float64_models(build_grpo_config(task, output, **changes))
    if recipe == "sft":
        return sft_config(task, {}, output=output, **changes)
    model = {"path": task / "model", "dtype": "float64"}
    settings = preference_settings(task, output, "actor", actor={"model": model}, **changes)
    return DPOConfig.model_validate(settings)


def with_engine(config: RunConfig, kind: str = PIPELINE) -> RunConfig:
    settings = config.model_dump()
    settings["actor"]["engine"] = {"kind": kind}
    if settings.get("reference"):
        settings["reference"]["engine"] = {"kind": kind}
    return type(config).model_validate(settings)


def run(config: RunConfig) -> list[dict[str, float]]:
    check_start(config)
    TRAIN[type(config)](config)
    return metrics_of(config)  # pyright: ignore[reportArgumentType] (any run has a metrics file)


def assert_equal_runs(expected: list[dict[str, float]], actual: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) > 1
    for line, other in zip(expected, actual, strict=True):
        assert_same(line, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_in_one_process_has_the_metrics_of_the_included_engine(
    recipe: str, task: Path, tmp_path: Path
) -> None:
    expected = run(build(recipe, task, tmp_path / "fsdp"))
    assert_equal_runs(expected, run(with_engine(build(recipe, task, tmp_path / "own"))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PIPELINE, "fsdp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_on_two_stages_has_the_metrics_of_one_process(
    recipe: str, kind: str, task: Path, tied: Path, ray_session: None, tmp_path: Path
) -> None:
    """Also exports the checkpoint of two processes, and compares the saved models.

    The included engine also divides the critic, and a model with tied embeddings.
    """
    task = task if kind == PIPELINE else tied
    expected = run(build(recipe, task, tmp_path / "fsdp"))
    divided = ["actor", *(["reference"] if recipe != "sft" else []), *(["critic"] if kind == "fsdp" else [])]
    roles = dict.fromkeys(ROLES, "main") if recipe in ("ppo", "grpo") else {}
    roles |= {role: {"pool": "main", "pp": 2} for role in divided if role != "critic" or recipe == "ppo"}
    placement = {"device": "cpu", "pools": {"main": [2]}, "roles": roles}
    config = with_engine(build(recipe, task, tmp_path / "own", backend="ray", placement=placement), kind)
    assert_equal_runs(expected, run(config))
    saved, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("fsdp", "own"))
    assert saved.keys() == other.keys()
    assert all(torch.allclose(saved[name], other[name], rtol=1e-9, atol=1e-9) for name in saved)
    checkpoint = Checkpoints(config.output).newest()
    assert checkpoint is not None
    export_model(checkpoint.path / "actor", tmp_path / "exported")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == saved.keys()


def test_an_engine_refuses_settings_and_roles_that_it_does_not_support(task: Path, tmp_path: Path) -> None:
    config = build("ppo", task, tmp_path / "run").model_dump()
    for changes, facts in (
        ({"engine": {"kind": PIPELINE, "packing": "always"}}, ("actor.engine", "packing", "fsdp")),
        ({"engine": {"kind": PIPELINE, "options": {"schedule": "1f1b"}}}, ("actor.engine", "schedule", "none")),
        ({"engine": {"kind": PIPELINE}, "lora": {"rank": 4}}, ("actor", "lora", "fsdp")),
        ({"engine": {"kind": "fdsp"}}, ("actor.engine.kind", "fdsp", "fsdp")),
        ({"engine": {"kind": f"{__name__}:TRAIN"}}, ("actor.engine.kind", "TrainCapabilities")),
        ({"engine": {"kind": "tests/nowhere.py:Engine"}}, ("actor.engine.kind", "tests/nowhere.py", "not", "exist")),
    ):
        with rejects(*facts, error=ValueError):
            PPOConfig.model_validate(config | {"actor": config["actor"] | changes})
    with rejects("critic", "values", "logprobs", "fsdp", error=ValueError):
        PPOConfig.model_validate(config | {"critic": config["critic"] | {"engine": {"kind": PIPELINE}}})


@pytest.mark.parametrize(
    ("kind", "sizes", "facts"),
    [
        (PIPELINE, {"tp": 2}, ("placement.roles.actor", "tp", "fsdp")),
        (PIPELINE, {}, ("placement.roles.actor", "dp", "fsdp")),
    ],
)
def test_an_unsupported_parallel_dimension_is_rejected(
    task: Path, tmp_path: Path, kind: str, sizes: dict[str, int], facts: tuple[str, ...]
) -> None:
    roles = dict.fromkeys(("rollout", "reward", "critic"), "main[0:1]") | {"actor": {"pool": "main"} | sizes}
    placement = {"device": "cpu", "pools": {"main": [2]}, "roles": roles | {"reference": "main[0:1]"}}
    config = build("ppo", task, tmp_path / "run", backend="ray", placement=placement).model_dump()
    config["actor"]["engine"] = {"kind": kind}
    with rejects(*facts, error=ConfigError):
        check_start(PPOConfig.model_validate(config))
