"""docs/algorithms.md names every setting of every choice with its default, and its example runs."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.algorithm.advantage import CORRECTIONS, ESTIMATORS
from flowrl.config.algorithm.choice import OWN, REQUIRED
from flowrl.config.algorithm.preference import PREFERENCE_LOSSES, PTX_FORMS
from flowrl.config.algorithm.shaping import KL_CONTROLS, SHAPINGS
from flowrl.config.roles import LOSSES

CHOICES: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "algorithm.estimator": ESTIMATORS,
    "actor.loss": LOSSES,
    "algorithm.correction.kind": CORRECTIONS,
    "algorithm.shaping, kind": SHAPINGS,
    "algorithm.kl_control.kind": KL_CONTROLS,
    "PreferenceConfig.loss": PREFERENCE_LOSSES,
    "PtxConfig.form": PTX_FORMS,
}


def shown(value: Any) -> str:
    """As YAML has it."""
    if value is REQUIRED:
        return "required"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def row(key: str, name: str, settings: Mapping[str, Any]) -> str:
    """The line of the table for a choice."""
    words = ", ".join(f"`{setting}: {shown(value)}`" for setting, value in settings.items())
    return f"| `{key}` | `{name}` | {words or 'none'} |"


@pytest.mark.parametrize("key", CHOICES)
def test_every_setting_stands_in_the_documents_with_its_default(key: str):
    text = Path("docs/algorithms.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    documented = {line for line in text.splitlines() if line.startswith(f"| `{key}` | `")}
    assert documented == {row(key, name, settings) for name, settings in CHOICES[key].items() if name != OWN}


def test_the_example_runs():
    text = Path("docs/algorithms.md").read_text()
    example = re.search(r"```python\n(import torch.*?)```", text, flags=re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    assert names["logprobs"].grad.abs().sum() > 0
