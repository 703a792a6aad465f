"""The recipes that train on preferences improve their held-out metric for several seeds."""

import subprocess
from pathlib import Path

import pytest

from flowrl.config import load
from recipes.dpo.config import DPOConfig
from recipes.dpo.train import train as train_policy
from recipes.quickstart.pairs import write_pairs
from recipes.quickstart.prepare import prepare
from recipes.reward_model.config import RewardModelRunConfig
from recipes.reward_model.train import train as train_reward_model
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[0, 1, 2])
def warm_start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Returns the folder of the quickstart's data and its warm start, and the seed."""
    folder, seed = tmp_path_factory.mktemp("seed"), request.param
    prepare(folder / "data", seed)
    write_pairs(folder / "data", seed)
    overrides = [f"output={folder}/sft", f"seed={seed}", f"actor.model.path={folder}/data/model"]
    config = load(ROOT / "recipes/quickstart/sft.yaml", [*overrides, f"data.train={folder}/data/sft.jsonl"], SFTConfig)
    train_sft(config)
    return folder, seed


def overrides_of(folder: Path, seed: int, role: str) -> list[str]:
    data = [f"data.train={folder}/data/pairs.jsonl", f"data.test={folder}/data/pairs_test.jsonl"]
    return [f"output={folder}/{role}", f"seed={seed}", f"{role}.model.path={folder}/sft/model", "backend=inline", *data]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reward_model_prefers_correct_answers(warm_start: tuple[Path, int]) -> None:
    path = ROOT / "recipes/reward_model/arithmetic.yaml"
    summary = train_reward_model(load(path, overrides_of(*warm_start, "reward"), RewardModelRunConfig))
    assert summary["accepted"] and summary["accuracy_after"] > 0.75


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dpo_raises_the_accuracy(warm_start: tuple[Path, int]) -> None:
    path = ROOT / "recipes/dpo/arithmetic.yaml"
    summary = train_policy(load(path, overrides_of(*warm_start, "actor"), DPOConfig))
    assert summary["accuracy_after"] > 0.75
    assert summary["evaluation/margin_after"] > 0


@pytest.mark.parametrize("script", ["reward_model/run_rm.sh", "dpo/run_dpo.sh"])
def test_scripts_are_short_and_valid(script: str) -> None:
    path = ROOT / "recipes" / script
    assert len(path.read_text().splitlines()) <= 5
    subprocess.run(["bash", "-n", path], check=True)
