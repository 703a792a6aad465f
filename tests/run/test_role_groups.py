"""A run, and `flowrl doctor`, report the protections against user code that the system does not offer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.user_code.isolation import describe_missing
from tests.run.test_doctor import RECIPE
from tests.small_task import prepare_small

ROOT = Path(__file__).parents[2]
WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    "sh",
)
"""Prefix of a command that may not create namespaces."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protections")
    prepare_small(folder / "data")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def run(*command: str) -> str:
    environment = os.environ | {"COLUMNS": "10000"}  # no message is wrapped
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(recipe: Path, output: Path, *prefix: str) -> tuple[dict[str, list[str]], list[str]]:
    """Runs a recipe. Returns the missing protections in its summary, and the lines that it printed about them."""
    settings = [str(recipe), "backend=inline", f"output={output}"]
    printed = run(*prefix, sys.executable, "-m", "recipes.grpo.train", *settings)
    summary = json.loads((output / "summary.json").read_text())
    return summary["missing_protections"], [line for line in printed.splitlines() if "docs/rewards.md" in line]


def can_unshare() -> bool:
    return subprocess.run([*WITHOUT_NAMESPACES, "true"], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_run_reports_missing_protections_once(recipe: Path, tmp_path: Path) -> None:
    with ScoringPool([], PoolLimits(workers=1, timeout_s=None)) as pool:
        missing = pool.find_missing_protections()
    summary, lines = train(recipe, tmp_path / "run")
    assert summary == ({"reward": list(missing)} if missing else {})
    assert len(lines) == bool(missing)
    assert all(line.startswith("reward: ") and describe_missing(missing) in line for line in lines)


@pytest.mark.slow
def test_a_system_without_namespaces_is_reported(recipe: Path, tmp_path: Path) -> None:
    # A system that does not allow this prefix has no namespaces either.
    prefix = WITHOUT_NAMESPACES if can_unshare() else ()
    summary, lines = train(recipe, tmp_path / "run", *prefix)
    assert {"environment", "descendants"} <= set(summary["reward"])
    (line,) = lines
    assert line.startswith("reward: ") and describe_missing(summary["reward"]) in line
    doctor = run(*prefix, sys.executable, "-m", "flowrl.cli", "doctor", str(recipe), "backend=inline")
    assert describe_missing(summary["reward"]) in doctor
