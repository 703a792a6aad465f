"""The shipped recipes and their warm starts have no findings, for three seeds. Each run takes a minute or more."""

from pathlib import Path

import pytest

from flowrl.health import read_findings
from tests.recipes.scripts import ROOT, read_summary, run_script

SCRIPTS = {
    "quickstart": "quickstart/run_quickstart.sh",
    "grpo": "grpo/run_grpo.sh",
    "rejection_sampling": "rejection_sampling/run_rejection_sampling.sh",
    "distillation": "distillation/run_distillation.sh",
    "dpo": "dpo/run_dpo.sh",
    "reward_model": "reward_model/run_rm.sh",
    "tools": "tools/run_calculator.sh",
    "games": "games/run_nim.sh",
    "reasoning": "reasoning/run_reasoning.sh",
    "moe": "moe/run_moe.sh",
    "split": "ppo/run_split_placement.sh",
    "async_2m1t": "detached/run_2m1t.sh",
    "async_2m2t": "detached/run_2m2t.sh",
    "async_int8": "detached/run_2m2t_int8.sh",
}
"""Scripts below `recipes/`. `ppo/run_ppo.sh` trains as the quickstart does."""

OWN_TASK = ("tools", "games", "reasoning", "moe")
"""Scripts that do not train the quickstart's model on its task."""


OF_TIMES = ("idle_devices",)
"""Checks of times. On a busy machine, the processes of a split placement wait for cores, and so for each other."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of data and warm starts, which recipes of the same task share."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("recipe", SCRIPTS)
def test_a_shipped_recipe_has_no_findings(recipe: str, seed: int, models: Path, tmp_path: Path) -> None:
    folder = models / (recipe if recipe in OWN_TASK else "arithmetic")
    run_script(ROOT / "recipes" / SCRIPTS[recipe], folder, f"output={tmp_path}/run", seed=seed)
    findings = read_findings(tmp_path / "run")
    assert [finding for finding in findings if finding.check not in OF_TIMES] == []
    assert len(read_summary(tmp_path / "run")["health"]) == len(findings)
    warm_starts = list(folder.glob("seed*/*/health.jsonl"))
    assert warm_starts and [finding for path in warm_starts for finding in read_findings(path.parent)] == []
