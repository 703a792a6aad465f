"""Numbers that cannot move: placement, backend and ranks change time, never what is sampled or learned."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl import Batch, Cluster, Placement
from flowrl.config import ModelConfig, RolloutConfig, TransferConfig, load
from flowrl.run.preflight import check_run
from flowrl.workers import Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.engines.closeness import FLOAT32_RTOL

ROLES = ("actor", "critic", "reference", "reward", "rollout")


def named(cases: Collection[str], *slow: str) -> list[Any]:
    """Cases by their names; those are slow whose parts are all in others too."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in cases]


CLOCK = {"seconds", "elapsed_s", "tokens_per_s", "memory_mb", "rollout_gap", "rollout_gap_max"}
CLOCK |= {"weights_compared", "weights_unreached"}
CLOCK |= {f"idle_{role}" for role in ("actor", "critic", "reference", "reward", "rollout")}
CLOCK |= {"wait_data_s", "wait_weights_s"}
"""What a placement may change; the gap between rollout and trainer is itself a rounding error, and weights are compared
where they travel."""

PLACEMENTS = {
    "one rank": Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(ROLES, "main")),
    "colocated on 2": Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main")),
    "colocated on 3": Placement(device="cpu", pools={"main": [3]}, roles=dict.fromkeys(ROLES, "main")),
    "split": load(Path("placement/split.yaml"), ["device=cpu"], Placement),
    "overlapping": Placement(
        device="cpu",
        pools={"a": [1], "b": [1]},
        roles={"actor": "a+b", "critic": "a+b", "reference": "b", "reward": "a", "rollout": "a"},
    ),
    "partly beside the actor": Placement(
        device="cpu",
        pools={"main": [2]},
        roles={"actor": "main[0:1]", "rollout": "main", "critic": "main", "reference": "main[1:]", "reward": "main"},
    ),
    "standalone": load(Path("placement/standalone.yaml"), ["device=cpu"], Placement),
}


def metrics_of(config: PPOConfig | GRPOConfig | SFTConfig) -> list[dict[str, float]]:
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in CLOCK} for line in lines]


def assert_same(expected: dict[str, float], found: dict[str, float]) -> None:
    """Compares metrics up to float32 rounding; gradient norms and maxima of ratios amplify it."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rtol = 5 * FLOAT32_RTOL if name.endswith(("grad_norm", "ratio_max")) else FLOAT32_RTOL
        assert found[name] == pytest.approx(value, rel=rtol, abs=rtol), name


@pytest.fixture(scope="module")
def inline_metrics() -> dict[str, list[dict[str, float]]]:
    """What `inline_ppo` has found."""
    return {}


def inline_ppo(found: dict[str, list[dict[str, float]]], name: str, config: PPOConfig) -> list[dict[str, float]]:
    """The metrics of an inline run, which is made once for all tests that compare with it."""
    if name not in found:
        train_ppo(config)
        found[name] = metrics_of(config)
    return found[name]


@pytest.mark.parametrize("name", named(PLACEMENTS, "one rank", "colocated on 3", "partly beside the actor"))
def test_ppo_gives_the_same_metrics_under_every_placement(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    expected_lines = inline_ppo(inline_metrics, "ppo", ppo_config(output=tmp_path / "inline"))
    placed = ppo_config(output=tmp_path / "placed", backend="ray", placement=PLACEMENTS[name])
    # Weights that travel come in many parts.
    transfer = TransferConfig(chunk_mb=0.05)
    placed = placed.model_copy(update={"rollout": placed.rollout.model_copy(update={"transfer": transfer})})
    train_ppo(placed)
    found = metrics_of(placed)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    for expected, line in zip(expected_lines, found, strict=True):
        assert_same(expected, line)


STRATEGIES = {
    "fsdp": ({"strategy": "fsdp"}, {}),
    "fsdp, the rollout on a part of the ranks": ({"strategy": "fsdp"}, {"rollout": "main[1:]", "reward": "main[0:1]"}),
    "fsdp, the rollout on as many other ranks": (
        {"strategy": "fsdp"},
        dict.fromkeys(("actor", "critic", "reference"), "main[0:1]+main[2:3]") | {"rollout": "main[0:2]"},
    ),
    "tp, in turns": (
        {"offload": "idle"},
        {role: {"pool": "main", "tp": 2} for role in ("actor", "critic", "reference")},
    ),
    "sp": ({"strategy": "ddp"}, {role: {"pool": "main", "sp": 2} for role in ("actor", "critic", "reference")}),
}
"""Engine of the three models, and where roles run instead of on both ranks."""


@pytest.mark.parametrize("name", named(STRATEGIES, "fsdp", "fsdp, the rollout on a part of the ranks"))
def test_ppo_gives_the_same_metrics_under_every_strategy(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    expected_lines = inline_ppo(inline_metrics, "ppo", ppo_config(output=tmp_path / "inline"))
    engine, places = STRATEGIES[name]
    placement = Placement.model_validate(
        {
            "device": "cpu",
            "pools": {"main": [3 if "other" in name else 2]},
            "roles": dict.fromkeys(ROLES, "main") | places,
        }
    )
    config = ppo_config(output=tmp_path / "cut", backend="ray", placement=placement)
    models = {
        role: getattr(config, role).model_dump() | {"engine": engine} for role in ("actor", "critic", "reference")
    }
    train_ppo(PPOConfig.model_validate(config.model_dump() | models))
    for expected, line in zip(expected_lines, metrics_of(config), strict=True):
        assert_same(expected, line)


LORA = {"rank": 4, "alpha": 16.0, "targets": "all_linear"}
FSDP = {"strategy": "fsdp"}
MAIN = dict.fromkeys(ROLES, "main")
ADAPTED = {
    "colocated on 2": ({}, MAIN),
    "fsdp": ({"actor": FSDP, "critic": FSDP}, MAIN),
    "tp": ({}, MAIN | {role: {"pool": "main", "tp": 2} for role in ("actor", "critic", "reference")}),
    "the rollout and the reference elsewhere": ({}, MAIN | {"rollout": "other", "reference": "other"}),
    "a reference in parts, some of them beside the actor": ({"reference": FSDP}, MAIN | {"reference": "main+other"}),
}
"""Engines, and where roles run."""


def with_adapters(config: PPOConfig, engines: dict[str, dict[str, str]]) -> PPOConfig:
    models = {role: getattr(config, role).model_dump() for role in ("actor", "critic", "reference")}
    for role in ("actor", "critic"):
        models[role]["lora"] = LORA
    for role, engine in engines.items():
        models[role]["engine"] = engine
    return PPOConfig.model_validate(config.model_dump() | models)


@pytest.mark.parametrize(
    "name", named(ADAPTED, "colocated on 2", "fsdp", "a reference in parts, some of them beside the actor")
)
def test_ppo_with_adapters_gives_the_same_metrics_under_every_placement(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    expected_lines = inline_ppo(inline_metrics, "lora", with_adapters(ppo_config(output=tmp_path / "inline"), {}))
    engines, roles = ADAPTED[name]
    pools = {"main": [2]} | ({"other": [1]} if "other" in str(roles) else {})
    placement = Placement.model_validate({"device": "cpu", "pools": pools, "roles": roles})
    placed = with_adapters(ppo_config(output=tmp_path / "placed", backend="ray", placement=placement), engines)
    train_ppo(placed)
    found = metrics_of(placed)
    assert found[1]["kl"] == pytest.approx(0, abs=1e-9) and found[3]["kl"] > 1e-5
    for expected, line in zip(expected_lines, found, strict=True):
        assert_same(expected, line)


def test_grpo_gives_the_same_metrics_on_one_and_two_ranks(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    inline = grpo_config(output=tmp_path / "inline")
    two = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main"))
    placed = grpo_config(output=tmp_path / "placed", backend="ray", placement=two)
    train_grpo(inline)
    train_grpo(placed)
    for expected, line in zip(metrics_of(inline), metrics_of(placed), strict=True):
        assert_same(expected, line)


def sft_config(task_folder: Path, **changes: Any) -> SFTConfig:
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    settings = {"model": {"path": task_folder / "model"}, "data": data, "optimizer": {"lr": 1e-3}, "batch_size": 32}
    return SFTConfig.model_validate(settings | {"backend": "inline", "threads": 1, "steps": 3} | changes)


SFT = {
    "fsdp": ({"engine": FSDP}, {}),
    "tp": ({}, {"tp": 2}),
    "sp": ({}, {"sp": 2}),
    "an adapter under fsdp": ({"engine": FSDP, "lora": LORA}, {}),
}
"""Settings, and sizes of the actor on two ranks."""


@pytest.mark.parametrize("name", named(SFT, "sp", "an adapter under fsdp"))
def test_sft_gives_the_same_metrics_under_every_strategy(
    name: str, ray_session: None, task_folder: Path, tmp_path: Path
) -> None:
    settings, sizes = SFT[name]
    roles = {"actor": {"pool": "main"} | sizes}
    placement = {"device": "cpu", "pools": {"main": [2]}, "roles": roles}
    inline = sft_config(task_folder, output=tmp_path / "inline", lora=settings.get("lora"))
    cut = sft_config(task_folder, output=tmp_path / "cut", backend="ray", placement=placement, **settings)
    for config in (inline, cut):
        check_run(config)
        train_sft(config)
    for expected, line in zip(metrics_of(inline), metrics_of(cut), strict=True):
        assert_same(expected, line)
    assert metrics_of(cut)[-1]["loss"] < 0.999 * metrics_of(cut)[0]["loss"]


def test_micro_batches_change_no_metric(ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    whole = ppo_config(output=tmp_path / "whole")
    actor = whole.actor.model_dump() | {"engine": {"max_tokens_per_microbatch": 40}}
    cut = ppo_config(output=tmp_path / "cut", actor=actor)
    train_ppo(whole)
    train_ppo(cut)
    for expected, line in zip(metrics_of(whole), metrics_of(cut), strict=True):
        assert_same(expected, line)


def test_the_first_on_policy_step_has_ratio_one_and_no_kl(ppo_config: Callable[..., PPOConfig]) -> None:
    config = ppo_config(steps=1, minibatch_size=32)
    train_ppo(config)
    first = metrics_of(config)[1]
    assert first["kl"] == 0
    assert first["actor/ratio"] == pytest.approx(1, abs=FLOAT32_RTOL)
    assert first["actor/approx_kl"] == pytest.approx(0, abs=1e-9)


def sampled(folder: Path, num_ranks: int, backend: Literal["ray", "inline"], order: list[int]) -> list[int]:
    """Response tokens of eight rows in the order of their ids, sampled in another order on some ranks."""
    prompts = [
        {"prompt_ids": [2, 3 + i % 4, 12, 3] + [4] * (i % 3), "prompt_id": i // 2, "sample": i % 2} for i in range(8)
    ]
    placement = Placement(device="cpu", pools={"main": [num_ranks]}, roles={"rollout": "main"})
    model = ModelConfig(path=folder / "model")
    with Cluster(placement, backend=backend, num_threads=1) as cluster:
        rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=6, max_num_seqs=3), model, seed=5)
        batch = Batch.from_rows(prompts).rows(order)
        answered = rollout.generate(batch).reorder(sorted(range(8), key=order.__getitem__))
        return answered.get("input_ids").tolist()


def test_sampled_tokens_depend_on_neither_ranks_nor_order(ray_session: None, task_folder: Path) -> None:
    expected = sampled(task_folder, 1, "inline", list(range(8)))
    assert sampled(task_folder, 3, "ray", [5, 2, 7, 0, 1, 6, 3, 4]) == expected
    assert sampled(task_folder, 1, "inline", [5, 2, 7, 0, 1, 6, 3, 4]) == expected
