"""The YAML files that ship with the recipes."""

import re
import subprocess
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.config import OptimizerConfig, load, models_of, recipe_class
from flowrl.config.setting_tree import find_disabled_settings

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if "recipe:" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_setting_disables_another_one(path: Path) -> None:
    assert not list(find_disabled_settings(load(path, [], recipe_class(path))))


HALF_STEP = 0.02 * 2**-8 * 0.75
"""About half the distance between two bfloat16 numbers near 0.02, a typical weight; AdamW changes it by about lr."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_learning_rate_changes_weights_of_the_trained_dtype(path: Path) -> None:
    config = load(path, [], recipe_class(path))
    for role, model in models_of(config).items():
        optimizer = getattr(model, "optimizer", None)
        if isinstance(optimizer, OptimizerConfig) and model.model is not None and model.model.dtype == "bfloat16":
            assert optimizer.lr > HALF_STEP, f"{role} trains bfloat16 weights with lr {optimizer.lr}"


GPU_CONFIGS = [path for path in CONFIGS if "device: cuda" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_gpu_config_has_a_valid_plan_for_its_gpus_of_80_gb(path: Path) -> None:
    devices = {"qwen0.5b": "1", "qwen1.5b": "1", "llama70b": "8,8"}.get(path.stem, "8")
    assert main(["plan", str(path), "--devices", devices, "placement.memory_gb=80"]) == 0


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_readme_of_a_recipe_links_its_gpu_configs(path: Path) -> None:
    assert f"]({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").glob("*/run_gpu.sh")), ids=lambda path: path.parent.name)
def test_a_gpu_script_without_arguments_names_a_config(script: Path) -> None:
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    names = re.findall(r"such as (\S+)", done.stderr)
    assert done.returncode == 1 and [(script.parent / f"{name}.yaml").is_file() for name in names] == [True]
