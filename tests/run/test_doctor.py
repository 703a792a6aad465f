"""`flowrl doctor` as a command, and what it says of rollouts that are not well."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrl import Placement
from flowrl.cli import main
from flowrl.config import CheckFailed, OnPolicyConfig, load
from flowrl.controller.errors import WorkerCheckError
from flowrl.run.doctor import examine
from flowrl.workers import Actor, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.quickstart.prepare import prepare
from tests.recipes.drifting import Drifting, Hotter

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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    prepare(folder / "data", seed=0)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


@pytest.fixture
def config(recipe: Path) -> Callable[..., OnPolicyConfig]:
    return lambda *settings: load(recipe, ["backend=inline", *settings], GRPOConfig)


def doctor(recipe: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--rollout", str(recipe), *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def rows_of(printed: str) -> dict[str, str]:
    cells = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells}


def test_a_rollout_in_another_process_is_well(recipe: Path) -> None:
    done = doctor(recipe)
    assert done.returncode == 0, done.stderr
    found = rows_of(done.stdout)
    assert found["engine"].startswith("hf, transformers ")
    assert found["weights compared"].startswith("27 as loaded, 27 and 27 after updates")
    assert "are transformers' own choice" in found["greedy tokens"]
    assert float(found["log-probability gap, sampled"].split()[0]) < 1e-5
    assert done.stdout.splitlines()[-1].startswith("the rollout serves the actor's weights")
    assert not (recipe.parent / "run").exists()


def test_one_that_is_asked_to_end_says_so(recipe: Path) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--rollout", str(recipe)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "starting actor, rollout (ray)\n"
        program.terminate()
        _, told = program.communicate(timeout=120)
        assert program.returncode == 143
    assert told.splitlines()[-1] == "ended by SIGTERM before all was compared; nothing was written"


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_is_well(recipe: Path) -> None:
    done = doctor(recipe, "rollout.engine=vllm")
    assert done.returncode == 0, done.stderr
    found = rows_of(done.stdout)
    assert found["engine"].startswith("vllm, ") and found["weights compared"].startswith("27 as loaded, 27 and 27 ")
    assert max(float(found[f"log-probability gap, {how}"].split()[2]) for how in ("greedy", "sampled")) < 1e-4
    assert found["greedy tokens"].endswith("are transformers' own choice")


def test_weights_that_the_two_share_are_not_compared(
    config: Callable[..., OnPolicyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    roles: dict[str, Any] = dict.fromkeys(("actor", "rollout", "reference", "reward"), "main")
    shared = config().model_copy(update={"placement": Placement(pools={"main": [1]}, roles=roles)})
    examine(shared, Actor, Rollout)
    assert rows_of(capsys.readouterr().out)["weights compared"] == "none: they are the actor's own"


def test_an_update_that_arrives_wrong_is_told(config: Callable[..., OnPolicyConfig]) -> None:
    with pytest.raises(WorkerCheckError, match=r"weights of version 1: 1 of the .* model.norm.weight by up to 0\.10"):
        examine(config(), Actor, Drifting, Console(quiet=True))


def test_a_gap_is_told_with_its_causes(
    config: Callable[..., OnPolicyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckFailed, match=r"the sampled tokens' log-probabilities are .* another temperature"):
        examine(config(), Actor, Hotter)
    found = rows_of(capsys.readouterr().out)
    assert float(found["log-probability gap, greedy"].split()[0]) < 1e-5
    assert float(found["log-probability gap, sampled"].split()[0]) > 1e-3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["rollout.check=loud"], "error: rollout.check=loud: rollout.check is 'loud', but must be "),
        (["backend=inline", "rollout.engine=vllm"], "error: rollout.engine is vllm, which takes a process for itself"),
        (["devices=[1]"], "error: placement.pools"),
        (["data.train=nowhere.jsonl"], "error: "),
    ],
)
def test_wrong_settings_are_one_sentence(
    recipe: Path, settings: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--rollout", str(recipe), *settings]) == 2
    told = capsys.readouterr().err
    assert told.startswith(sentence) and told.count("\n") == 1


def test_a_recipe_without_a_rollout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--rollout", str(ROOT / "recipes/quickstart/sft.yaml")]) == 2
    assert "SFTConfig has no rollout: name a recipe that samples responses" in capsys.readouterr().err
