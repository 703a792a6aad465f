"""Rejection sampling and distillation give the same metrics with any placement and strategy."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.distillation.train import train as distill
from recipes.rejection_sampling.train import train as train_on_best
from tests.configs import with_float64_models
from tests.recipes.rollout_configs import distillation_config, rejection_config, save_teacher

PLACEMENTS: dict[str, tuple[dict[str, list[int]], dict[str, str]]] = {
    "colocated": ({"main": [2]}, {"actor": "main", "rollout": "main", "teacher": "main", "reward": "main"}),
    "split": (
        {"policy": [1], "judges": [1]},
        {"actor": "policy", "rollout": "policy", "teacher": "judges", "reward": "judges"},
    ),
    "standalone": (
        {"train": [1], "make": [1], "rest": [1]},
        {"actor": "train", "rollout": "make", "teacher": "rest", "reward": "rest"},
    ),
}
STAGES = {
    "rejection sampling": ("reward", ("reward", "reward_selected", "actor/loss")),
    "sampled_reverse_kl": ("teacher", ("actor/loss", "actor/reverse_kl")),
    "topk_forward_kl": ("teacher", ("actor/loss", "actor/teacher_mass")),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": {"rank": 4}},
    "fsdp": {"engine": {"strategy": "fsdp"}},
}


def metrics(task: Path, output: Path, stage: str, engine: dict[str, Any], placement: str | None) -> list[float]:
    """Returns the metrics of three steps, and of the evaluation after the last one."""
    role, names = STAGES[stage]
    settings: dict[str, Any] = {"actor": dict(engine)}
    if placement is not None:
        pools, roles = PLACEMENTS[placement]
        own = {name: pool for name, pool in roles.items() if name in ("actor", "rollout", role)}
        settings |= {"backend": "ray", "placement": {"device": "cpu", "pools": pools, "roles": own}}
    if role == "reward":
        train_on_best(with_float64_models(rejection_config(task, output, minibatch_size=3, **settings)))
    else:
        settings["actor"] |= {"loss": {"kind": stage} | ({"k": 5} if stage == "topk_forward_kl" else {})}
        teacher = save_teacher(output.parent / "teacher")
        distill(with_float64_models(distillation_config(task, output, teacher, minibatch_size=6, **settings)))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    held_out = "accuracy" if role == "reward" else "agreement"
    return [record[name] for record in records if record["step"] for name in names] + [records[-1][held_out]]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("placement", "engine"),
    [
        ("colocated", "plain"),
        ("split", "plain"),
        ("standalone", "plain"),
        ("colocated", "lora"),
        ("colocated", "fsdp"),
    ],
)
def test_metrics_do_not_depend_on_the_placement(
    task_folder: Path, tmp_path: Path, stage: str, placement: str, engine: str
) -> None:
    adapter = {"lora": ENGINES[engine]["lora"]} if "lora" in ENGINES[engine] else {}
    expected = metrics(task_folder, tmp_path / "inline", stage, adapter, None)
    actual = metrics(task_folder, tmp_path / "ray", stage, ENGINES[engine], placement)
    assert actual == pytest.approx(expected, abs=1e-5)
