"""Every recipe trains with the parts for large models, has a plan, resumes exactly, and exports its model."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from flowrl.cli import main
from flowrl.config import Placement
from tests.engines.tiny import qwen3_moe
from tests.recipes.preference_configs import write_few_pairs
from tests.recipes.test_optimizers import check_resume

ROLES: dict[str, tuple[str, ...]] = {
    "ppo": ("actor", "critic", "reference", "rollout", "reward"),
    "grpo": ("actor", "reference", "rollout", "reward"),
    "sft": ("actor",),
    "dpo": ("actor", "reference"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(task_folder: Path) -> Path:
    write_few_pairs(task_folder)
    return task_folder


@pytest.fixture(scope="module")
def mixture_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the task with a mixture of experts, which has the tokenizer of its model."""
    folder = tmp_path_factory.mktemp("mixture") / "task"
    shutil.copytree(task, folder)
    dense = AutoConfig.from_pretrained(folder / "model")
    names = ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    qwen3_moe(**{name: getattr(dense, name) for name in names}).save_pretrained(folder / "model")
    return folder


def check_recipe(recipe: str, task: Path, folder: Path, role: dict[str, Any], **changes: Any) -> None:
    """Checks that a run of the recipe can be resumed and exported, and that its config has a plan."""
    check_resume(recipe, task, folder, role, **changes)
    recorded = (folder / "again/config.yaml").read_text()
    planned = recorded.replace("recipe: null", f"recipe: recipes.{recipe}.config:{recipe.upper()}Config")
    (folder / "config.yaml").write_text(planned)
    assert main(["plan", str(folder / "config.yaml")]) == 0


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, of the extra optimizers")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("recipe", ROLES)
def test_an_adapter_of_a_quantized_base(recipe: str, quantization: str, task: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "base_quantization": quantization}
    check_recipe(recipe, task, tmp_path, {"lora": lora})


@pytest.mark.parametrize("recipe", ROLES)
def test_experts_divided_over_two_ranks(recipe: str, mixture_task: Path, ray_session: None, tmp_path: Path) -> None:
    """A role without a training engine that divides experts has all of them."""
    engine = {"strategy": "fsdp", "expert_parallel": True}
    placement = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES[recipe], "main"))
    changes = {"backend": "ray", "placement": placement}
    check_recipe(recipe, mixture_task, tmp_path, {"engine": engine, "router_loss_coef": 0.01}, **changes)
