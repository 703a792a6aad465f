"""Rejection sampling and distillation improve their held-out measure for several seeds."""

import subprocess
from pathlib import Path

import pytest

from flowrl.config import load
from recipes.distillation.config import DistillationConfig
from recipes.distillation.train import train as distill
from recipes.quickstart.pairs import write_pairs
from recipes.quickstart.prepare import prepare
from recipes.rejection_sampling.config import RejectionSamplingConfig
from recipes.rejection_sampling.train import train as train_on_best
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft

ROOT = Path(__file__).parents[2]

MIN_GAIN = 0.08
"""Smallest gain of the held-out accuracy. Seed 0 gains 0.154 in 60 of the 100 steps."""

MIN_AGREEMENT_GAIN = 0.03
"""Smallest gain of the held-out agreement. Seed 0 gains 0.045 (reverse KL) and 0.098 (forward KL) in 40 of the 100
steps."""


def fine_tune(folder: Path, seed: int, name: str, *overrides: str) -> None:
    """Trains a model from scratch, and saves it in the run folder `name`."""
    settings = [f"output={folder}/{name}", f"seed={seed}", f"actor.model.path={folder}/data/model", *overrides]
    train_sft(load(ROOT / "recipes/quickstart/sft.yaml", settings, SFTConfig))


@pytest.fixture(scope="module", params=[0, 1, 2])
def warm_start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Returns the folder of the quickstart's data and its warm start, and the seed."""
    folder, seed = tmp_path_factory.mktemp("seed"), request.param
    prepare(folder / "data", seed)
    fine_tune(folder, seed, "sft", f"data.train={folder}/data/sft.jsonl")
    return folder, seed


def overrides_of(folder: Path, seed: int, name: str) -> list[str]:
    data = [f"data.train={folder}/data/train.jsonl", f"data.test={folder}/data/test.jsonl"]
    places = ["backend=inline", "placement=single", f"output={folder}/{name}"]
    return [*places, f"seed={seed}", f"actor.model.path={folder}/sft/model", *data]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rejection_sampling_raises_the_accuracy(warm_start: tuple[Path, int]) -> None:
    path = ROOT / "recipes/rejection_sampling/arithmetic.yaml"
    summary = train_on_best(load(path, overrides_of(*warm_start, "best"), RejectionSamplingConfig))
    assert summary["accuracy_after"] > summary["accuracy_before"] + MIN_GAIN


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", ["{kind: sampled_reverse_kl}", "{kind: topk_forward_kl, k: 8}"])
def test_distillation_raises_the_agreement_with_the_teacher(warm_start: tuple[Path, int], loss: str) -> None:
    folder, seed = warm_start
    if not (folder / "teacher").exists():
        write_pairs(folder / "data", seed)
        files = f"[{{path: {folder}/data/sft.jsonl}}, {{path: {folder}/data/pairs.jsonl}}]"
        fine_tune(folder, seed, "teacher", "steps=700", f"data.train={files}")
    overrides = overrides_of(folder, seed, loss.split()[1].rstrip(",}"))
    overrides += [f"teacher.model.path={folder}/teacher/model", f"actor.loss={loss}"]
    path = ROOT / "recipes/distillation/arithmetic.yaml"
    summary = distill(load(path, overrides, DistillationConfig))
    assert summary["agreement_after"] > summary["agreement_before"] + MIN_AGREEMENT_GAIN


@pytest.mark.parametrize("script", ["rejection_sampling/run_rejection_sampling.sh", "distillation/run_distillation.sh"])
def test_scripts_are_short_and_valid(script: str) -> None:
    path = ROOT / "recipes" / script
    assert len(path.read_text().splitlines()) <= 5
    subprocess.run(["bash", "-n", path], check=True)
