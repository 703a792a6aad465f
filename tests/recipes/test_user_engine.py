"""An engine that is not part of flowrl runs under every schedule, with weight sync, a killed replica and a resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import Placement, to_yaml
from flowrl.data.batch.batch import Batch
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from flowrl.workers import LANGUAGE_MODELING, Actor, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.engines.rollout.scripted_engine import checksum
from tests.recipes.test_numbers import metrics_of

GrpoConfigs = Callable[..., GRPOConfig]
ENGINE = "tests.engines.rollout.scripted_engine"
ASYNC = {"kind": "async", "max_staleness": 2}
TRAINED = dict.fromkeys(("actor", "reference", "reward"), "train")


def scripted(folder: Path, name: str = "ScriptedEngine") -> dict[str, Any]:
    """Returns rollout settings of an engine that writes the checksums of its weights into a folder."""
    folder.mkdir(exist_ok=True)
    settings = {"engine": f"{ENGINE}:{name}", "options": {"folder": str(folder)}, "check_weights": "complete"}
    return {"max_response_tokens": 6, **settings}


def detached(num_replicas: int = 1) -> Placement:
    pools = {"train": [1], "make": [num_replicas]}
    return Placement(device="cpu", pools=pools, roles=TRAINED | {"rollout": "make"})


def assert_engines_have_the_weights_of_the_actor(config: GRPOConfig, num_engines: int = 1) -> None:
    """Compares the checksums of the last version in every engine with those of the saved policy."""
    saved = {name: checksum(array) for name, array in load_file(config.output / "model/model.safetensors").items()}
    received = list(Path(str(config.rollout.options["folder"])).glob(f"{config.steps}-*.json"))
    assert len(received) == num_engines and saved
    for file in received:
        checksums = json.loads(file.read_text())
        assert {name: checksums[name] for name in saved} == saved


def assert_all_weights_were_compared(config: GRPOConfig) -> None:
    """A streaming replica may load a version after the step's record, so some records have no comparison."""
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()[1:]]
    compared = [line for line in lines if "weights_compared" in line]
    assert (compared or config.schedule.is_streaming) and all(
        line["weights_compared"] > line["weights_unreached"] == 0 for line in compared
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        pytest.param({"kind": "sync"}, None, id="sync, in the actor's process", marks=pytest.mark.slow),
        pytest.param({"kind": "one_step_off"}, detached(), id="one_step_off", marks=pytest.mark.slow),
        pytest.param(ASYNC, detached(), id="async"),
    ],
)
def test_a_users_engine_trains_inline(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: dict[str, Any], placement: Placement | None
) -> None:
    changes: dict[str, Any] = {} if placement is None else {"placement": placement}
    config = grpo_config(rollout=scripted(tmp_path / "weights"), schedule=schedule, **changes)
    train(config)
    assert_engines_have_the_weights_of_the_actor(config)
    if placement is not None:
        assert_all_weights_were_compared(config)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"kind": "sync"}, {"kind": "one_step_off"}, ASYNC], ids=lambda s: s["kind"])
def test_a_users_engine_trains_in_its_own_processes(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    """Under sync, engine and actor share a device and no process."""
    is_sync = schedule["kind"] == "sync"
    placement = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys((*TRAINED, "rollout"), "main"))
    config = grpo_config(
        backend="ray",
        rollout=scripted(tmp_path / "weights", "DedicatedEngine"),
        schedule=schedule,
        placement=placement if is_sync else detached(2),
    )
    train(config)
    assert_engines_have_the_weights_of_the_actor(config, 1 if is_sync else 2)
    assert_all_weights_were_compared(config)


@pytest.mark.slow
def test_a_killed_replica_of_a_users_engine_is_replaced(
    grpo_config: GrpoConfigs, ray_session: None, tmp_path: Path
) -> None:
    rollout_settings = scripted(tmp_path / "weights", "DedicatedEngine")
    config = grpo_config(steps=6, backend="ray", placement=detached(2), schedule=ASYNC, rollout=rollout_settings)
    prompts, _ = read_prompts(config)
    trained: list[int] = []
    with Run(config) as run:
        actor: Any = run.group("actor", Actor, config.actor)
        rollout: Any = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        run.add_checkpointable(actor)
        victim, _ = rollout.run(process_id)
        for batch in run.rollouts(rollout, prompts, policy=actor):
            trained += batch["prompt_id"].get("prompt_id").tolist()[:: config.samples_per_prompt]
            if run.step == 3:
                os.kill(victim, signal.SIGKILL)
            run.log(actor.update(batch, LANGUAGE_MODELING))  # changes the weights that the engines receive
            run.sync_weights(actor, rollout)
        # A replaced engine may still load weights. Generation for the recipe waits until all engines have the newest.
        rollout.generate(Batch.from_rows(prompts.evaluation_rows(2)).with_samples(1), temperature=0.0)
        run.save_model(actor)
        summary = run.finish()
        assert rollout.run(engine_version) == [config.steps] * 2
    assert summary["replicas_lost"] >= 1
    assert sorted(trained) == list(range(config.steps * config.prompts_per_step))
    assert_engines_have_the_weights_of_the_actor(config, 2)


def process_id(worker: Any) -> int:
    return os.getpid()


def engine_version(worker: Rollout) -> int:
    return worker.engine.version


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"kind": "sync"}, {"kind": "one_step_off"}], ids=lambda s: s["kind"])
def test_a_run_with_a_users_engine_resumes_bitwise_identically(
    grpo_config: GrpoConfigs, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": 1, "keep_last": None}, "schedule": schedule}
    straight = grpo_config(rollout=scripted(tmp_path / "weights"), placement=detached(), **changes)
    train(straight)
    resumed = straight.model_copy(update={"output": tmp_path / "resumed", "resume": "auto"})
    shutil.copytree(straight.output, resumed.output)
    checkpoints = Checkpoints(resumed.output)
    for step in checkpoints.steps():
        if step > 1:
            shutil.rmtree(checkpoints.read(step).path)
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "weights").mkdir()
    train(resumed)
    assert metrics_of(resumed) == metrics_of(straight)
    assert_engines_have_the_weights_of_the_actor(resumed)


def test_a_plan_shows_a_users_engine_and_imports_no_torch(grpo_config: GrpoConfigs, tmp_path: Path) -> None:
    """The sizes of the models are unknown, because a plan measures the memory of known models with torch."""
    config = grpo_config(rollout=scripted(tmp_path / "weights"), placement=detached(), schedule=ASYNC)
    (tmp_path / "config.yaml").write_text(
        to_yaml(config.model_copy(update={"recipe": "recipes.grpo.config:GRPOConfig"}))
    )
    code = (
        "import sys; from flowrl.cli import main; status = main(['plan', *sys.argv[1:]]);"
        "print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules]); sys.exit(status)"
    )
    unknown = [f"{role}.model.path=unknown/model" for role in ("actor", "reference")]
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml"), *unknown]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    *plan, modules = done.stdout.splitlines()
    assert modules == "[]"
    assert any("object store" in line for line in plan)
    assert all("model.path" in line for line in plan if "memory unknown" in line)
