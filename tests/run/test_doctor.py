"""`flowrl doctor` as a command, and the differences that it detects."""

import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flowrl import Placement
from flowrl.cli import main
from flowrl.config import CheckFailed, OnPolicyConfig, load
from flowrl.controller.errors import WorkerCheckError
from flowrl.run.doctor import examine
from flowrl.workers import Actor, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.quickstart.prepare import CHARACTERS, SPECIAL
from tests.engines.closeness import random_rounding_rtol, reduction_rtol
from tests.errors import rejects
from tests.recipes.drifting import Drifting, Hotter
from tests.small_task import prepare_small

ROOT = Path(__file__).parents[2]
RECIPE = """
recipe: recipes.grpo.config:GRPOConfig
output: {folder}/run
steps: 1
batch_size: 4
minibatch_size: 4
samples_per_prompt: 2
threads: 1
placement:
  device: cpu
  pools: {{a: [1], b: [1], c: [1]}}
  roles: {{actor: a, rollout: b, reference: c, reward: c}}
actor:
  model: {{path: {folder}/data/model}}
  optimizer: {{lr: 0.001}}
reference:
  model: {{path: {folder}/data/model}}
reward:
  function: recipes.quickstart.task:score
rollout:
  max_response_tokens: 6
  temperature: 0.8
algorithm:
  estimator: grpo
data:
  train: {folder}/data/train.jsonl
  max_prompt_tokens: 16
"""

STORED_GAP = reduction_rtol(torch.float32, length=1, depth=1) * 16
"""Bound on the gap of float64 models: the rollout stores log-probabilities, here above -16, in float32."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    prepare_small(folder / "data")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


@pytest.fixture
def config(recipe: Path) -> Callable[..., OnPolicyConfig]:
    return lambda *settings: load(recipe, ["backend=inline", *settings], GRPOConfig)


def doctor(recipe: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", str(recipe), *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def rows_of(printed: str) -> dict[str, str]:
    cells = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells}


@pytest.mark.slow
def test_a_rollout_in_another_process_passes(recipe: Path) -> None:
    done = doctor(recipe, "actor.model.dtype=float64")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert rows["engine"].startswith("hf, transformers ")
    assert re.findall(r"\d+", rows["weights compared"])[:3] == ["27"] * 3
    num_equal, num_tokens = re.findall(r"\d+", rows["greedy tokens"])[:2]
    assert num_equal == num_tokens
    assert float(rows["log-probability gap, sampled"].split()[0]) < STORED_GAP
    assert done.stdout.splitlines()[-1].startswith("OK: ")
    assert not (recipe.parent / "run").exists()


@pytest.mark.slow
def test_a_signal_ends_the_doctor(recipe: Path) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", str(recipe)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "starting actor, rollout (ray)\n"
        program.terminate()
        _, errors = program.communicate(timeout=120)
        assert program.returncode == 143
    assert "SIGTERM" in errors.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
@pytest.mark.parametrize("sizes", ["b", "{pool: b, tp: 2}", "{pool: b, pp: 2}"], ids=["one device", "tp", "pp"])
def test_vllm_passes(sizes: str, recipe: Path) -> None:
    num_devices = 1 if sizes == "b" else 2
    placement = [f"placement.roles.rollout={sizes}", f"placement.pools.b=[{num_devices}]"]
    done = doctor(recipe, "rollout.engine=vllm", *placement)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert rows["engine"].startswith("vllm, ")
    assert re.findall(r"\d+", rows["weights compared"])[:3] == ["27"] * 3
    largest = max(float(rows[f"log-probability gap, {how}"].split()[2]) for how in ("greedy", "sampled"))
    # The quickstart's model has two layers of seven products of at most 256 terms, and the head. Its log-probabilities
    # are close to those of a uniform distribution.
    rtol = random_rounding_rtol(torch.float32, length=256, depth=2 * 7 + 1)
    assert largest < rtol * math.log(len(SPECIAL) + len(CHARACTERS))
    num_equal, num_tokens = re.findall(r"\d+", rows["greedy tokens"])[:2]
    assert num_equal == num_tokens


def test_shared_weights_are_not_compared(
    config: Callable[..., OnPolicyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    roles: dict[str, Any] = dict.fromkeys(("actor", "rollout", "reference", "reward"), "main")
    shared = config().model_copy(update={"placement": Placement(pools={"main": [1]}, roles=roles)})
    examine(shared, Actor, Rollout)
    assert rows_of(capsys.readouterr().out)["weights compared"].startswith("none ")


def test_wrong_weights_are_an_error(config: Callable[..., OnPolicyConfig]) -> None:
    with rejects("version", 1, "model.norm.weight", error=WorkerCheckError) as caught:
        examine(config(), Actor, Drifting, Console(quiet=True))
    assert re.search(r"\b0\.10\d*\b", str(caught.value))


def test_a_gap_is_an_error_with_its_causes(
    config: Callable[..., OnPolicyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckFailed, match=r"sampled\b.*\btemperature"):
        examine(config("actor.model.dtype=float64"), Actor, Hotter)
    rows = rows_of(capsys.readouterr().out)
    assert float(rows["log-probability gap, greedy"].split()[0]) < STORED_GAP
    assert float(rows["log-probability gap, sampled"].split()[0]) > 1e-3


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        (["rollout.check=loud"], "error: rollout.check=loud: "),
        (["backend=inline", "rollout.engine=vllm"], "error: rollout.engine=vllm: rollout.engine "),
        (["devices=[1]"], "error: {recipe}:11: placement.pools.b "),
        (["data.train=nowhere.jsonl"], "error: "),
    ],
)
def test_wrong_settings_are_a_one_line_error(
    recipe: Path, settings: list[str], prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(recipe), *settings]) == 2
    message = capsys.readouterr().err
    assert message.startswith(prefix.format(recipe=recipe)) and message.count("\n") == 1


def test_a_recipe_without_a_rollout_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(ROOT / "recipes/quickstart/sft.yaml")]) == 2
    assert "SFTConfig" in capsys.readouterr().err
