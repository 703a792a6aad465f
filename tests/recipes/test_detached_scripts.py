"""The scripts of the detached placements, in short runs on CPU devices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("run_2m1t.sh", "run_2m2t.sh", "run_2m2t_int8.sh", "run_tp_maker.sh", "run_pp_trainer.sh")
SHORT = ("steps=3", "batch_size=64", "minibatch_size=32", "evaluate_every=0")

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_short_and_valid(script: str) -> None:
    path = ROOT / "recipes/detached" / script
    assert len(path.read_text().splitlines()) <= 5
    subprocess.run(["bash", "-n", path], check=True)


def test_all_scripts_are_tested() -> None:
    assert {path.name for path in (ROOT / "recipes/detached").glob("*.sh")} == set(SCRIPTS)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder in which the first script creates data and model, for all scripts."""
    return tmp_path_factory.mktemp("task")


def run_script(script: str, task: Path, output: Path) -> tuple[dict, list[dict]]:
    """Returns the resolved settings and the metrics of the steps of a short run."""
    variables = {"OUTPUT": str(task), "VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "recipes/detached" / script), f"output={output}", *SHORT]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return json.loads((output / "summary.json").read_text()), [line for line in lines if line["step"]]


def check(summary: dict, steps: list[dict]) -> None:
    assert summary["steps"] == 3 and [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in steps)
    assert all(0 <= line["reward"] <= 1 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replicas_with_int8_weights_differ_a_little_from_the_actor(task: Path, tmp_path: Path) -> None:
    summary, steps = run_script("run_2m2t_int8.sh", task, tmp_path / "run")
    check(summary, steps)
    assert all(1e-5 < line["rollout_gap"] < 0.1 for line in steps)
    assert all(0.8 < line["correction/weight"] < 1.2 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trainer_with_two_stages_sends_its_weights_to_the_replicas(task: Path, tmp_path: Path) -> None:
    summary, steps = run_script("run_pp_trainer.sh", task, tmp_path / "run")
    check(summary, steps)
    assert sum(line.get("weights_compared", 0) for line in steps) > 0
    # The first responses are those of the initial weights, so only rounding differs.
    assert steps[0]["rollout_gap"] < 1e-5


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tensor_parallel_vllm_replica_serves_two_trainers(task: Path, tmp_path: Path) -> None:
    summary, steps = run_script("run_tp_maker.sh", task, tmp_path / "run")
    check(summary, steps)
    # A step has no comparison if the replica loads no weights in it.
    assert sum(line.get("weights_compared", 0) for line in steps) > 0
    names = {event["name"] for event in json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]}
    assert names >= {"add", "poll", "update"}
