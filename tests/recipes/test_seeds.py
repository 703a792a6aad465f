"""The quickstart gains at least 0.20 held-out accuracy for every seed."""

import json
import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_gains_a_fifth_for_every_seed(seed: int, tmp_path: Path) -> None:
    variables = os.environ | {"OUTPUT": str(tmp_path), "SEED": str(seed)}
    subprocess.run(["bash", "recipes/quickstart/run_quickstart.sh"], env=variables, check=True, capture_output=True)
    summary = json.loads((tmp_path / f"seed{seed}" / "ppo" / "summary.json").read_text())
    assert summary["evaluation_rows"] >= 1000
    assert summary["peak_memory_mb"] < 4000
    assert 0.2 <= summary["accuracy_before"] <= 0.35
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_learns_the_same_task(tmp_path: Path) -> None:
    subprocess.run(["bash", "recipes/grpo/run_grpo.sh", f"output={tmp_path}/grpo"], check=True, capture_output=True)
    summary = json.loads((tmp_path / "grpo" / "summary.json").read_text())
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.15
