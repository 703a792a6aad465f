"""docs/algorithms.md lists every setting of every union member with its default, and its example runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import (
    AnyAdvantage,
    AnyCorrection,
    AnyDistillation,
    AnyKlControl,
    AnyPolicyLoss,
    AnyPreference,
    AnyRewardModelLoss,
    AnyShaping,
    Config,
)
from flowrl.config.base import CUSTOM, Member, members_of

UNIONS = {
    "algorithm.estimator": AnyAdvantage,
    "actor.loss.kind": AnyPolicyLoss,
    "algorithm.correction.kind": AnyCorrection,
    "algorithm.shaping, kind": AnyShaping,
    "algorithm.kl_control.kind": AnyKlControl,
    "actor.loss.kind (dpo)": AnyPreference,
    "actor.loss.kind (distillation)": AnyDistillation,
    "reward.loss.kind": AnyRewardModelLoss,
}


def to_text(value: Any) -> str:
    """Returns a value as YAML."""
    if isinstance(value, Config):
        return f"{{kind: {dict(value)['kind']}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def row(key: str, name: str, member: type[Member]) -> str:
    """Returns the row of the table for a member of a union."""
    fields = {
        n: f for n, f in member.model_fields.items() if n not in (member.KEY, "correction", "shaping", "mask_truncated")
    }
    texts = {n: "required" if f.is_required() else to_text(f.default) for n, f in fields.items()}
    return f"| `{key}` | `{name}` | {', '.join(f'`{n}: {text}`' for n, text in texts.items()) or 'none'} |"


@pytest.mark.parametrize("key", UNIONS)
def test_every_setting_is_documented_with_its_default(key: str):
    text = Path("docs/algorithms.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    documented = {line for line in text.splitlines() if line.startswith(f"| `{key}` | `")}
    assert documented == {row(key, name, member) for name, member in members_of(UNIONS[key]).items() if name != CUSTOM}


def test_the_example_runs():
    text = Path("docs/algorithms.md").read_text()
    example = re.search(r"```python\n(import torch.*?)```", text, flags=re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    assert names["logprobs"].grad.abs().sum() > 0
