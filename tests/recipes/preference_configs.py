"""Settings of the recipes that train on preferences, for the quickstart's task."""

from pathlib import Path
from typing import Any

from recipes.dpo.config import DPOConfig
from recipes.quickstart.pairs import write_pairs
from recipes.reward_model.config import RewardModelRunConfig
from tests.configs import NO_REPORT

NUM_ROWS = {"pairs.jsonl": 120, "pairs_test.jsonl": 20}


def write_few_pairs(folder: Path) -> None:
    """Writes the first pairs of each file next to the quickstart's data."""
    write_pairs(folder, seed=0)
    for name, num_rows in NUM_ROWS.items():
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:num_rows]))


def preference_settings(task: Path, output: Path, role: str, **changes: Any) -> dict[str, Any]:
    settings = {
        "output": output,
        "backend": "inline",
        "threads": 1,
        "batch_size": 16,
        role: {"model": {"path": task / "model"}, "optimizer": {"lr": 1e-3}},
        "data": {"train": task / "pairs.jsonl", "test": task / "pairs_test.jsonl", "max_prompt_tokens": 16},
        "report": NO_REPORT,
    }
    settings[role] |= changes.pop(role, {})
    return settings | {"steps": 3} | changes


def dpo_config(task: Path, output: Path, **changes: Any) -> DPOConfig:
    return DPOConfig.model_validate(preference_settings(task, output, "actor", **changes))


def reward_model_config(task: Path, output: Path, **changes: Any) -> RewardModelRunConfig:
    return RewardModelRunConfig.model_validate(preference_settings(task, output, "reward", **changes))
