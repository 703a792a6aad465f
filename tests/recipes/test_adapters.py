"""Runs that start from a saved adapter, train complete modules beside an adapter, and send only the adapter."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Placement
from flowrl.cli.main import main
from flowrl.config import ModelConfig, UserError
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.weights import full_weights
from flowrl.run.checks.check_list import check_start
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from recipes.sft.train import train as train_sft
from tests.configs import with_float64_models
from tests.recipes.test_numbers import assert_same, metrics_of, sft_config

LORA = {"rank": 4, "alpha": 8.0, "rslora": True, "modules_to_save": ["lm_head"]}
ROLES = ("actor", "critic", "reference", "reward", "rollout")
SPLIT = Placement.model_validate(
    {
        "device": "cpu",
        "pools": {"main": [1], "other": [1]},
        "roles": dict.fromkeys(ROLES, "main") | {"rollout": "other", "reference": "other"},
    }
)


@pytest.fixture(scope="module")
def adapter(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the exported adapter of an SFT run with a complete head."""
    folder = tmp_path_factory.mktemp("adapter")
    optimizer = {"actor": {"lora": LORA, "optimizer": {"lr": 1e-2}}, "checkpoint": {"every": 3}}
    train_sft(sft_config(task_folder, output=folder / "run", **optimizer))
    assert main(["export", str(folder / "run"), "--adapter", "--output", str(folder / "adapter")]) == 0
    return folder / "adapter"


def starting_from(
    adapter: Path, config: PPOConfig, lora: dict[str, Any] | None, *, is_float64: bool = True
) -> PPOConfig:
    """Returns a config whose models start from the adapter. The actor trains it further if `lora` is set."""
    models = {role: getattr(config, role).model_dump() for role in ("actor", "critic", "reference")}
    for settings in models.values():
        settings["model"] |= {"path": adapter}
    models["actor"]["lora"] = lora
    started = PPOConfig.model_validate(config.model_dump() | models)
    return with_float64_models(started) if is_float64 else started


def with_lora(config: PPOConfig, lora: dict[str, Any]) -> PPOConfig:
    return PPOConfig.model_validate(config.model_dump() | {"actor": config.actor.model_dump() | {"lora": lora}})


def values(config: PPOConfig, name: str) -> list[float]:
    """Returns a metric of each step."""
    records = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if record["step"]]


@pytest.mark.parametrize("lora", [LORA, None], ids=["trained further", "merged"])
def test_a_run_starts_from_the_policy_of_an_adapter(
    lora: dict[str, Any] | None, adapter: Path, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    together = starting_from(adapter, ppo_config(output=tmp_path / "together"), lora)
    apart = starting_from(adapter, ppo_config(output=tmp_path / "apart", placement=SPLIT), lora)
    for config in (together, apart):
        check_start(config)
        train_ppo(config)
    lines = metrics_of(together)
    # The reference is the initial policy, and the rollout samples from it.
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-9) and lines[3]["kl"] > 1e-6
    assert all(gap < 1e-5 for gap in values(together, "rollout_gap"))
    for expected, line in zip(lines, metrics_of(apart), strict=True):
        assert_same(expected, line)
    assert all(values(apart, "weights_compared"))


def test_a_rollout_that_shares_weights_on_some_devices_gets_the_adapter_on_the_others(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    roles = dict.fromkeys(ROLES, "main") | {"rollout": "main+other"}
    placement = Placement.model_validate(SPLIT.model_dump() | {"roles": roles})
    together, beside = (
        with_float64_models(with_lora(ppo_config(output=tmp_path / name, **settings), {"rank": 4}))
        for name, settings in (("together", {}), ("beside", {"placement": placement}))
    )
    for config in (together, beside):
        train_ppo(config)
    for expected, line in zip(metrics_of(together), metrics_of(beside), strict=True):
        assert_same(expected, line)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao, of the extra optimizers")
def test_a_rollout_in_another_process_starts_with_the_quantized_policy(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    lora = {"rank": 4, "base_quantization": "int8"}
    config = with_lora(ppo_config(output=tmp_path / "run", placement=SPLIT), lora)
    train_ppo(config)
    assert all(gap < 1e-5 for gap in values(config, "rollout_gap"))


def test_other_settings_of_the_adapter_are_rejected_before_the_run_starts(
    adapter: Path, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    config = starting_from(adapter, ppo_config(output=tmp_path / "run"), LORA | {"rank": 8})
    with pytest.raises(UserError, match=r"^actor\.lora .*rank is 4, not 8.*remove lora"):
        check_start(config)
    assert not (tmp_path / "run").exists()


def test_a_run_continues_and_exports_the_adapter_that_it_trains_further(
    adapter: Path, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    config = starting_from(adapter, ppo_config(output=tmp_path / "run", steps=2, checkpoint={"every": 1}), LORA)
    train_ppo(config)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert main(["export", str(tmp_path / "run"), "--adapter", "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    names = ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save")
    assert {name: written[name] for name in names} == {name: settings[name] for name in names}
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    exported = dict(full_weights(load_policy(ModelConfig(path=tmp_path / "merged", dtype="float64"))))
    saved = dict(full_weights(load_policy(ModelConfig(path=tmp_path / "out", dtype="float64"))))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(weight, saved[name]) for name, weight in exported.items())
    initial = dict(full_weights(load_policy(ModelConfig(path=adapter, dtype="float64"))))
    assert not torch.equal(initial["model.embed_tokens.weight"], saved["model.embed_tokens.weight"])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_generates_with_the_adapter_of_the_actor(
    ray_session: None, adapter: Path, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    base = ppo_config(output=tmp_path / "run", backend="ray", placement=SPLIT)
    rollout = base.rollout.model_dump(exclude_unset=True) | {"engine": "vllm", "check_weights": "complete"}
    config = PPOConfig.model_validate(base.model_dump() | {"rollout": rollout})
    config = starting_from(adapter, config, LORA, is_float64=False)
    train_ppo(config)
    assert all(values(config, "weights_compared")) and not any(values(config, "weights_unreached"))
    assert all(gap < 1e-4 for gap in values(config, "rollout_gap"))
