"""The YAML files that ship with the recipes."""

from pathlib import Path

import pytest

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
