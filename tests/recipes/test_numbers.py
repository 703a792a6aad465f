"""Placement, backend, strategy and micro-batches change time, never results.

The compared runs train float64 models, so that two summation orders differ by about 1e-16 and every metric can be
compared with `FLOAT64_RTOL`. Losses, log-probabilities, values, advantages, gradients and Adam's state keep float64.
Three computations stay in float32: transformers' RMS norms and rotary angles, which are computed per token and thus
have no summation order that depends on the placement; scores, which are stored in float32; and the stored
`rollout_logprobs`, of which `rollout_gap` is the only reader here. A difference of 1e-16 moves the float32 input of a
norm to another rounding with a probability of about 1e-9 per element, and one such element of 1e5 changes a batch mean
by less than 1e-11.

One case trains float32 models, whose metrics differ by the rounding errors that Adam amplifies.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl import Batch, Cluster, Placement
from flowrl.config import ModelConfig, RolloutConfig, TransferConfig, load
from flowrl.run.checks.check_list import check_start
from flowrl.workers import Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import with_float64_models
from tests.engines.closeness import FLOAT32_RTOL, FLOAT64_RTOL
from tests.slow_cases import as_parameters

ROLES = ("actor", "critic", "reference", "reward", "rollout")


CLOCK = {"seconds", "elapsed_s", "tokens_per_s", "memory_mb", "rollout_gap", "rollout_gap_max"}
CLOCK |= {"weights_compared", "weights_unreached"}
CLOCK |= {f"idle_{role}" for role in ("actor", "critic", "environment", "reference", "reward", "rollout")}
CLOCK |= {"wait_data_s", "wait_weights_s", "rewards/reward/seconds", "rewards/environment/seconds"}
"""Metrics that may depend on the placement. The gap between rollout and trainer is a rounding error. Weights are only
compared if they are sent."""

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
    "partly colocated with the actor": Placement(
        device="cpu",
        pools={"main": [2]},
        roles={"actor": "main[0:1]", "rollout": "main", "critic": "main", "reference": "main[1:]", "reward": "main"},
    ),
    "standalone": load(Path("placement/standalone.yaml"), ["device=cpu"], Placement),
}


def metrics_of(config: PPOConfig | GRPOConfig | SFTConfig) -> list[dict[str, float]]:
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in CLOCK and not name.startswith("usage/")}
        for line in lines
    ]


def assert_same(expected: dict[str, float], actual: dict[str, float], rtol: float = FLOAT64_RTOL) -> None:
    """Asserts that the metrics of a step are equal up to summation order.

    `rtol` is relative to the metric or to 1, whichever is larger: losses and advantages are differences of terms of
    typical size 1, so small values carry the rounding error of those terms.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=rtol, abs=rtol), name


@pytest.fixture(scope="module")
def inline_metrics() -> dict[str, list[dict[str, float]]]:
    """Results of `inline_ppo` by name."""
    return {}


def inline_ppo(results: dict[str, list[dict[str, float]]], name: str, config: PPOConfig) -> list[dict[str, float]]:
    """Returns the metrics of an inline run, which all tests with the same `name` share."""
    if name not in results:
        train_ppo(config)
        results[name] = metrics_of(config)
    return results[name]


@pytest.mark.parametrize("name", as_parameters(PLACEMENTS, "colocated on 2"))
def test_ppo_gives_the_same_metrics_under_every_placement(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    inline = with_float64_models(ppo_config(output=tmp_path / "inline"))
    expected_records = inline_ppo(inline_metrics, "ppo", inline)
    records = train_placed(with_float64_models(ppo_config(output=tmp_path / "placed")), PLACEMENTS[name])
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for expected, actual in zip(expected_records, records, strict=True):
        assert_same(expected, actual)


@pytest.mark.slow
def test_ppo_in_float32_gives_the_same_metrics_on_two_ranks(
    ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    inline = ppo_config(output=tmp_path / "inline")
    train_ppo(inline)
    records = train_placed(ppo_config(output=tmp_path / "placed"), PLACEMENTS["colocated on 2"])
    for expected, actual in zip(metrics_of(inline), records, strict=True):
        assert_same(expected, actual, rtol=FLOAT32_RTOL)


def train_placed(config: PPOConfig, placement: Placement) -> list[dict[str, float]]:
    """Trains on Ray with weight transfers in several buckets; returns the metrics."""
    rollout = config.rollout.model_copy(update={"transfer": TransferConfig(bucket_mb=0.05)})
    placed = config.model_copy(update={"backend": "ray", "placement": placement, "rollout": rollout})
    train_ppo(placed)
    return metrics_of(placed)


STRATEGIES = {
    "fsdp": ({"strategy": "fsdp"}, {}),
    "fsdp on one rank per role": (
        {"strategy": "fsdp"},
        {"actor": "main[0:1]", "reference": "main[0:1]", "critic": "main[1:]", "rollout": "main[0:1]"},
    ),
    "fsdp in one process": ({"strategy": "fsdp"}, {}),
    "fsdp on one rank, the rollout and the reference on another": (
        {"strategy": "fsdp"},
        {"actor": "main[0:1]", "critic": "main[0:1]", "rollout": "main[1:]", "reference": "main[1:]"},
    ),
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
"""Engine of the three models, and where roles run instead of on all ranks."""

NUM_PROCESSES = {"fsdp in one process": 1, "fsdp, the rollout on as many other ranks": 3}
"""Number of processes; two for the other strategies."""


@pytest.mark.parametrize("name", as_parameters(STRATEGIES, "fsdp"))
def test_ppo_gives_the_same_metrics_under_every_strategy(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    inline = with_float64_models(ppo_config(output=tmp_path / "inline"))
    expected_lines = inline_ppo(inline_metrics, "ppo", inline)
    engine, role_settings = STRATEGIES[name]
    placement = Placement.model_validate(
        {
            "device": "cpu",
            "pools": {"main": [NUM_PROCESSES.get(name, 2)]},
            "roles": dict.fromkeys(ROLES, "main") | role_settings,
        }
    )
    config = with_float64_models(ppo_config(output=tmp_path / "sharded", backend="ray", placement=placement))
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
    "a sharded reference, partly colocated with the actor": ({"reference": FSDP}, MAIN | {"reference": "main+other"}),
}
"""Engines, and where roles run."""


def with_adapters(config: PPOConfig, engines: dict[str, dict[str, str]]) -> PPOConfig:
    models = {role: getattr(config, role).model_dump() for role in ("actor", "critic", "reference")}
    for role in ("actor", "critic"):
        models[role]["lora"] = LORA
    for role, engine in engines.items():
        models[role]["engine"] = engine
    return PPOConfig.model_validate(config.model_dump() | models)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_ppo_with_adapters_gives_the_same_metrics_under_every_placement(
    name: str, ray_session: None, ppo_config: Callable[..., PPOConfig], tmp_path: Path, inline_metrics: dict
) -> None:
    inline = with_adapters(with_float64_models(ppo_config(output=tmp_path / "inline")), {})
    expected_lines = inline_ppo(inline_metrics, "lora", inline)
    engines, roles = ADAPTED[name]
    pools = {"main": [2]} | ({"other": [1]} if "other" in str(roles) else {})
    placement = Placement.model_validate({"device": "cpu", "pools": pools, "roles": roles})
    config = with_float64_models(ppo_config(output=tmp_path / "placed", backend="ray", placement=placement))
    placed = with_adapters(config, engines)
    train_ppo(placed)
    lines = metrics_of(placed)
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-9) and lines[3]["kl"] > 1e-5
    for expected, line in zip(expected_lines, lines, strict=True):
        assert_same(expected, line)


@pytest.mark.slow
def test_grpo_gives_the_same_metrics_on_one_and_two_ranks(
    ray_session: None, grpo_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    inline = with_float64_models(grpo_config(output=tmp_path / "inline"))
    two = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main"))
    placed = with_float64_models(grpo_config(output=tmp_path / "placed", backend="ray", placement=two))
    train_grpo(inline)
    train_grpo(placed)
    for expected, line in zip(metrics_of(inline), metrics_of(placed), strict=True):
        assert_same(expected, line)


def sft_config(task_folder: Path, actor: dict[str, Any], **changes: Any) -> SFTConfig:
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    model = {"path": task_folder / "model", "dtype": "float64"}
    settings = {"actor": {"model": model, "optimizer": {"lr": 1e-3}} | actor, "data": data, "batch_size": 32}
    return SFTConfig.model_validate(settings | {"backend": "inline", "threads": 1, "steps": 3} | changes)


SFT = {
    "fsdp": ({"engine": FSDP}, {}),
    "tp": ({}, {"tp": 2}),
    "sp": ({}, {"sp": 2}),
    "an adapter under fsdp": ({"engine": FSDP, "lora": LORA}, {}),
}
"""Settings, and sizes of the actor on two ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SFT)
def test_sft_gives_the_same_metrics_under_every_strategy(
    name: str, ray_session: None, task_folder: Path, tmp_path: Path
) -> None:
    settings, sizes = SFT[name]
    roles = {"actor": {"pool": "main"} | sizes}
    placement = {"device": "cpu", "pools": {"main": [2]}, "roles": roles}
    inline = sft_config(task_folder, {"lora": settings.get("lora")}, output=tmp_path / "inline")
    sharded = sft_config(task_folder, settings, output=tmp_path / "sharded", backend="ray", placement=placement)
    for config in (inline, sharded):
        check_start(config)
        train_sft(config)
    for expected, line in zip(metrics_of(inline), metrics_of(sharded), strict=True):
        assert_same(expected, line)
    assert metrics_of(sharded)[-1]["actor/loss"] < 0.999 * metrics_of(sharded)[0]["actor/loss"]


@pytest.mark.slow
def test_micro_batches_change_no_metric(ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    one_pass = with_float64_models(ppo_config(output=tmp_path / "one_pass"))
    actor = one_pass.actor.model_dump() | {"engine": {"max_tokens_per_microbatch": 40}}
    split = with_float64_models(ppo_config(output=tmp_path / "split", actor=actor))
    train_ppo(one_pass)
    train_ppo(split)
    for expected, line in zip(metrics_of(one_pass), metrics_of(split), strict=True):
        assert_same(expected, line)


def test_the_first_on_policy_step_has_ratio_one_and_no_kl(ppo_config: Callable[..., PPOConfig]) -> None:
    config = with_float64_models(ppo_config(steps=1, minibatch_size=32))
    train_ppo(config)
    first = metrics_of(config)[1]
    assert first["kl"] == 0
    assert first["actor/ratio"] == pytest.approx(1, rel=FLOAT64_RTOL)
    assert first["actor/approx_kl"] == pytest.approx(0, abs=FLOAT64_RTOL)


def sampled(folder: Path, num_ranks: int, backend: Literal["ray", "inline"], order: list[int]) -> list[int]:
    """Returns the response tokens of eight rows by id, sampled in a given order on some ranks."""
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


@pytest.mark.slow
def test_sampled_tokens_depend_on_neither_ranks_nor_order(ray_session: None, task_folder: Path) -> None:
    expected = sampled(task_folder, 1, "inline", list(range(8)))
    assert sampled(task_folder, 3, "ray", [5, 2, 7, 0, 1, 6, 3, 4]) == expected
    assert sampled(task_folder, 1, "inline", [5, 2, 7, 0, 1, 6, 3, 4]) == expected
