"""A run of N steps equals one that is interrupted after k steps and resumed.

Equality is bitwise on the same number of ranks. On other ranks float64 models are compared as in test_numbers.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowrl.checkpoints.checkpoints import Checkpoints, Score
from flowrl.cli import main
from flowrl.config import ModelConfig, Placement, to_yaml
from flowrl.engines.checkpoint.export import export_model
from flowrl.engines.checkpoint.shards import read_index
from flowrl.report.chrome_trace import read_trace
from flowrl.run.interrupt import Interrupted
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train as train_ppo
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import NO_REPORT, AnyConfig, with_float64_models
from tests.recipes import crashing
from tests.recipes.conftest import FinishedRun, build_ppo_config
from tests.recipes.test_numbers import CLOCK, ROLES, assert_same, metrics_of, with_adapters

TWO = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main"))
APART = Placement(
    device="cpu",
    pools={"train": [2], "rest": [1]},
    roles={"actor": "train", "critic": "train"} | dict.fromkeys(("reference", "reward", "rollout"), "rest"),
)
EVERY_2 = {"every": 2}
WEIGHTS = "model.safetensors"
Configs = Callable[..., PPOConfig]


def trained(config: PPOConfig | GRPOConfig | SFTConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


def training_rows(config: PPOConfig | GRPOConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (config.output / "rollouts").glob("training-*.jsonl")}


def assert_bitwise_identical(resumed: PPOConfig | GRPOConfig, straight: PPOConfig | GRPOConfig) -> None:
    """Asserts bitwise identical metrics, saved rows and weights.

    Evaluations differ, because each run starts and ends with one.
    """
    assert training_rows(resumed) == training_rows(straight)
    for line, expected in zip(metrics_of(resumed), metrics_of(straight), strict=True):
        shared = {name for name in line.keys() & expected.keys() if not name.endswith("/seconds")}
        assert all(map(is_evaluation, line.keys() ^ expected.keys()))
        assert {name: line[name] for name in shared} == {name: expected[name] for name in shared}
    weights, others = trained(resumed), trained(straight)
    assert all(torch.equal(weights[name], others[name]) for name in others) and weights.keys() == others.keys()


@pytest.fixture(scope="module")
def straight(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """Trains five steps without interruption; returns the config."""
    config = build_ppo_config(task_folder, tmp_path_factory.mktemp("straight"), steps=5)
    train_ppo(config)
    return config


@pytest.fixture(scope="module")
def straight_float64(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """Trains float64 models for five steps without interruption; returns the config."""
    config = with_float64_models(build_ppo_config(task_folder, tmp_path_factory.mktemp("float64"), steps=5))
    train_ppo(config)
    return config


def from_step(config: AnyConfig, step: int, output: Path) -> AnyConfig:
    """Returns the config of a copy of the run that resumes from the checkpoint of `step`."""
    shutil.copytree(config.output, output)
    checkpoints = Checkpoints(output)
    for newer in checkpoints.steps():
        if newer > step:
            shutil.rmtree(checkpoints.folder(newer))
    return config.model_copy(update={"output": output, "resume": "auto"})


def test_a_run_with_all_features_resumes_bitwise_identically(sync_run: FinishedRun[PPOConfig], tmp_path: Path) -> None:
    """The state includes the positions of dynamic sampling and of the text of PTX."""
    straight = sync_run.config
    assert Checkpoints(straight.output).steps() == [4, 5]
    again = from_step(straight, 4, tmp_path / "again")
    summary = train_ppo(again)
    assert_bitwise_identical(again, straight)
    assert Checkpoints(again.output).steps() == [4, 5]
    assert summary["steps"] == 5 and summary["seconds"] > metrics_of_clock(again)[-1]["elapsed_s"]
    dropped = [run["groups"]["dropped"] for run in (summary, sync_run.summary)]
    assert dropped[0] == dropped[1] and dropped[0]["equal_scores"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ppo_resumes_bitwise_identically(ppo_config: Configs, straight: PPOConfig, asynchronous: bool) -> None:
    checkpoint = {"every": 2, "asynchronous": asynchronous}
    train_ppo(ppo_config(steps=3, checkpoint=checkpoint))
    again = ppo_config(steps=5, checkpoint=checkpoint, resume="auto")
    summary = train_ppo(again)
    assert_bitwise_identical(again, straight)
    assert Checkpoints(again.output).steps() == [4, 5]
    assert summary["steps"] == 5 and summary["seconds"] > metrics_of_clock(again)[-1]["elapsed_s"]


@pytest.mark.slow
def test_an_evaluation_only_at_the_end_does_not_rank_checkpoints(ppo_config: Configs) -> None:
    config = ppo_config(steps=3, checkpoint={"every": 1, "keep_last": 1, "keep_best": 1})
    train_ppo(config)
    rewards = {line["step"]: line["reward"] for line in metrics_of(config)[1:]}
    checkpoints = Checkpoints(config.output)
    assert set(checkpoints.steps()) == {3, max(rewards, key=lambda step: (rewards[step], step))}
    assert {checkpoints.read(step).manifest.score for step in checkpoints.steps()} == {
        Score("reward", rewards[step]) for step in checkpoints.steps()
    }


def metrics_of_clock(config: PPOConfig) -> list[dict[str, float]]:
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name in CLOCK} for line in lines]


def crashing_config(ppo_config: Configs, **changes: Any) -> PPOConfig:
    """Returns the config of `straight` with an equal KL estimator that can crash."""
    algorithm = ppo_config().algorithm.model_dump() | {"kl_kind": f"{crashing.__name__}:kl"}
    return ppo_config(steps=5, algorithm=algorithm, resume="auto", **changes)


@pytest.mark.slow
def test_a_crashed_run_resumes_from_its_newest_checkpoint(
    ppo_config: Configs, straight: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing.reset_calls()
    monkeypatch.setenv(crashing.CRASH_AT, "5")
    config = crashing_config(ppo_config, checkpoint=EVERY_2)
    with pytest.raises(ValueError, match="crash"):
        train_ppo(config)
    assert [line["step"] for line in metrics_of(config)] == [0, 1, 2, 3]
    assert Checkpoints(config.output).steps() == [2]
    monkeypatch.delenv(crashing.CRASH_AT)
    train_ppo(config)
    assert_bitwise_identical(config, straight)
    elapsed = [line["elapsed_s"] for line in metrics_of_clock(config)[1:]]
    assert elapsed == sorted(elapsed)


@pytest.mark.slow
def test_a_run_that_crashed_before_its_first_checkpoint_starts_over(
    ppo_config: Configs, straight: PPOConfig, tmp_path: Path
) -> None:
    config = ppo_config(steps=5, checkpoint=EVERY_2, resume="auto")
    config.output.mkdir()
    (config.output / "config.yaml").write_text(to_yaml(config))
    (config.output / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    train_ppo(config)
    assert_bitwise_identical(config, straight)


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_of_its_step(
    ppo_config: Configs, straight: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing.reset_calls()
    monkeypatch.setenv(crashing.ASK_AT, "2")
    config = crashing_config(ppo_config, checkpoint={"every": 100})
    with pytest.raises(Interrupted, match=r"\b2 of 5\b"):
        train_ppo(config)
    assert Checkpoints(config.output).steps() == [2]
    train_ppo(config)
    assert_bitwise_identical(config, straight)


@pytest.mark.slow
def test_a_killed_driver_resumes_bitwise_identically(ppo_config: Configs, straight: PPOConfig, tmp_path: Path) -> None:
    config = ppo_config(recipe="recipes.ppo.config:PPOConfig", steps=5, checkpoint={"every": 1}, resume="auto")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "recipes.ppo.train", str(tmp_path / "config.yaml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not Checkpoints(config.output).steps() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert Checkpoints(config.output).steps()
    train_ppo(config)
    assert_bitwise_identical(config, straight)


@pytest.mark.slow
def test_grpo_resumes_bitwise_identically(grpo_config: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    straight = grpo_config(steps=4, output=tmp_path / "straight")
    train_grpo(straight)
    train_grpo(grpo_config(steps=2, checkpoint=EVERY_2))
    again = grpo_config(steps=4, checkpoint=EVERY_2, resume="auto")
    train_grpo(again)
    assert_bitwise_identical(again, straight)
    trace = read_trace(again.output)
    assert [resume.step for resume in trace.resumes] == [2]
    updates = [sum(event.method == "update" for event in events) for events in (trace.events, trace.last_process())]
    assert updates[0] == 2 * updates[1] == sum(e.method == "update" for e in read_trace(straight.output).events) > 0


@pytest.mark.slow
def test_adapters_resume_bitwise_identically_from_adapter_checkpoints(
    ppo_config: Configs, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ModelConfig(path=shutil.copytree(task_folder / "model", tmp_path / "model"))

    def adapted(**changes: Any) -> PPOConfig:
        config = with_adapters(ppo_config(**changes), {})
        return config.model_copy(update={"actor": config.actor.model_copy(update={"model": own})})

    straight = with_adapters(ppo_config(steps=4, output=tmp_path / "straight"), {})
    train_ppo(straight)
    train_ppo(adapted(steps=2, checkpoint=EVERY_2))
    again = adapted(steps=4, checkpoint=EVERY_2, resume="auto")
    train_ppo(again)
    assert_bitwise_identical(again, straight)
    checkpoint = Checkpoints(again.output).folder(4)
    assert not [name for name in read_index(checkpoint / "actor").tensors if ".lora_" not in name]
    export_model(checkpoint / "actor", tmp_path / "exported")
    exported, model = load_file(tmp_path / "exported" / "model.safetensors"), trained(again)
    assert exported.keys() == model.keys() and all(torch.equal(exported[name], model[name]) for name in model)
    assert main(["export", str(again.output), "--adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(again.actor.model.path)
    merged = PeftModel.from_pretrained(base, again.output / "adapter-step-000004").merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], model[name]) for name in model)
    heavier = {name: 2 * weight for name, weight in load_file(own.path / WEIGHTS).items()}
    save_file(heavier, own.path / WEIGHTS, {"format": "pt"})
    for _ in ("changed", "missing"):
        assert main(["export", str(again.output), "--output", str(tmp_path / "another")]) == 2
        assert str(own.path) in capsys.readouterr().err
        shutil.rmtree(own.path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_export_of_a_sharded_checkpoint_equals_the_final_model(
    ray_session: None, ppo_config: Configs, tmp_path: Path, adapted: bool
) -> None:
    config = ppo_config(steps=2, backend="ray", placement=TWO, checkpoint=EVERY_2)
    config = with_adapters(config, {}) if adapted else config
    models = {
        role: getattr(config, role).model_dump() | {"engine": {"strategy": "fsdp"}} for role in ("actor", "critic")
    }
    config = PPOConfig.model_validate(config.model_dump() | models)
    train_ppo(config)
    assert main(["export", str(config.output), "--output", str(tmp_path / "exported")]) == 0
    exported, model = load_file(tmp_path / "exported" / "model.safetensors"), trained(config)
    assert exported.keys() == model.keys() and all(torch.equal(exported[name], model[name]) for name in model)


@pytest.mark.slow
def test_an_adaptive_penalty_resumes_bitwise_identically(ppo_config: Configs, tmp_path: Path) -> None:
    control = {"kind": "adaptive", "target": 0.001, "horizon": 200}
    algorithm = {"estimator": "gae", "kl_coef": 0.05, "kl_control": control, "shaping": [{"kind": "normalize_rewards"}]}
    straight = ppo_config(steps=4, output=tmp_path / "straight", algorithm=algorithm)
    train_ppo(straight)
    coefs = [line["kl_coef"] for line in metrics_of(straight)[1:]]
    assert len(set(coefs)) == 4
    train_ppo(ppo_config(steps=2, algorithm=algorithm, checkpoint=EVERY_2))
    again = ppo_config(steps=4, algorithm=algorithm, checkpoint=EVERY_2, resume="auto")
    train_ppo(again)
    assert_bitwise_identical(again, straight)


def with_engine(config: PPOConfig, engine: dict[str, Any], **sizes: int) -> PPOConfig:
    """Returns the config with float64 models on two ranks that share them."""
    models = {role: getattr(config, role).model_dump() | {"engine": engine} for role in ("actor", "critic")}
    sharded_roles = dict.fromkeys(("actor", "critic"), {"pool": "main"} | sizes)
    placement = {"device": "cpu", "pools": {"main": [2]}, "roles": dict.fromkeys(ROLES, "main") | sharded_roles}
    sharded = PPOConfig.model_validate(config.model_dump() | models | {"backend": "ray", "placement": placement})
    return with_float64_models(sharded)


@pytest.mark.slow
def test_a_sharded_run_resumes_unsharded_and_with_another_sharding(
    ray_session: None, ppo_config: Configs, straight_float64: PPOConfig, tmp_path: Path
) -> None:
    begun = with_engine(ppo_config(steps=3, checkpoint=EVERY_2), {"strategy": "fsdp"})
    train_ppo(begun)
    shutil.copytree(begun.output, tmp_path / "copy")
    tensor_parallel = with_engine(ppo_config(steps=5, checkpoint=EVERY_2, resume="auto"), {"strategy": "auto"}, tp=2)
    alone = with_float64_models(ppo_config(steps=5, output=tmp_path / "copy", checkpoint=EVERY_2, resume="auto"))
    for again in (tensor_parallel, alone):
        train_ppo(again)
        for line, expected in zip(metrics_of(again), metrics_of(straight_float64), strict=True):
            assert_same(without_evaluations(expected), without_evaluations(line))


def test_sft_resumes_with_unseen_examples(task_folder: Path, tmp_path: Path) -> None:
    actor = {"model": {"path": task_folder / "model"}, "optimizer": {"lr": 1e-3}}
    data = {"train": task_folder / "sft.jsonl", "max_prompt_tokens": 16}
    sizes = {"steps": 4, "batch_size": 32, "checkpoint": EVERY_2, "report": NO_REPORT}
    settings = {"output": tmp_path / "straight", "backend": "inline", "threads": 1, "actor": actor, "data": data}
    straight = SFTConfig.model_validate(settings | sizes)
    train_sft(straight)
    again = from_step(straight, 2, tmp_path / "again")
    train_sft(again)
    assert all(torch.equal(trained(again)[name], weight) for name, weight in trained(straight).items())


@pytest.mark.slow
def test_two_ranks_resume_bitwise_identically_and_one_rank_up_to_summation_order(
    ray_session: None, ppo_config: Configs, straight_float64: PPOConfig, tmp_path: Path
) -> None:
    two = with_float64_models(ppo_config(steps=5, output=tmp_path / "two", backend="ray", placement=TWO))
    train_ppo(two)
    begun = with_float64_models(
        ppo_config(steps=3, output=tmp_path / "begun", backend="ray", placement=TWO, checkpoint=EVERY_2)
    )
    train_ppo(begun)
    shutil.copytree(begun.output, tmp_path / "copy")
    again = begun.model_copy(update={"steps": 5, "resume": "auto"})
    train_ppo(again)
    assert_bitwise_identical(again, two)
    alone = with_float64_models(ppo_config(steps=5, output=tmp_path / "copy", checkpoint=EVERY_2, resume="auto"))
    train_ppo(alone)
    for line, expected in zip(metrics_of(alone), metrics_of(straight_float64), strict=True):
        assert_same(without_evaluations(expected), without_evaluations(line))


@pytest.mark.slow
def test_two_ranks_with_a_separate_rollout_resume_from_one_rank(
    ray_session: None, ppo_config: Configs, straight_float64: PPOConfig
) -> None:
    """The separate rollout samples from the weights that the actor has loaded."""
    train_ppo(with_float64_models(ppo_config(steps=3, checkpoint=EVERY_2)))
    again = with_float64_models(ppo_config(steps=5, backend="ray", placement=APART, checkpoint=EVERY_2, resume="auto"))
    train_ppo(again)
    for line, expected in zip(metrics_of(again), metrics_of(straight_float64), strict=True):
        assert_same(without_evaluations(expected), without_evaluations(line))


def without_evaluations(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if not is_evaluation(name)}


def is_evaluation(name: str) -> bool:
    return name == "accuracy" or name.startswith("evaluation/")
