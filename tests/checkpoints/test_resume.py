"""A resumed run accepts some changed settings and rejects the others with their key."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.checkpoints.checkpoints import Checkpoints, Role, new_manifest
from flowrl.checkpoints.resume import MAY_DIFFER, RunComplete, differences, find_checkpoint, is_resuming
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import RunConfig, to_yaml
from flowrl.data.checksums import CheckpointError, write_json_with_checksum
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings, ppo_settings
from tests.errors import missing_facts, rejects


def actor(**changes: Any) -> dict[str, Any]:
    return {"actor": {"model": {"path": "m"}, "optimizer": {"lr": 1e-3}} | changes}


def config(folder: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output": folder,
        "resume": "auto",
        "steps": 10,
        **actor(),
        "data": {"train": "t.jsonl", "max_prompt_tokens": 8},
        "batch_size": 4,
    }
    return SFTConfig.model_validate(settings | changes)


def checkpoint(folder: Path, step: int, driver: Mapping[str, Any] | None = None) -> None:
    checkpoints = Checkpoints(folder)
    files = {"driver.json": write_json_with_checksum(checkpoints.begin(step, ["actor"]) / "driver.json", driver or {})}
    checkpoints.commit(step, new_manifest(step, None, {"actor": Role(1, "")}, {}, files))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run at step 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config(folder)))
    checkpoint(folder, 4)
    return folder


def error_of(changed: RunConfig) -> str:
    with pytest.raises(RunFolderError) as caught:
        is_resuming(changed)
    return str(caught.value)


def test_the_document_lists_the_settings_that_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.partition("| area | settings that may change |\n|---|---|\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(.+?)`", table)) == sorted(MAY_DIFFER)


def test_a_run_resumes_from_the_newest_checkpoint_of_its_folder(run: Path) -> None:
    unfinished = Checkpoints(run).begin(6, ["actor"])
    newest = find_checkpoint(config(run))
    assert newest is not None and newest.manifest.step == 4
    assert not unfinished.exists()


def test_a_new_folder_is_not_resumed(tmp_path: Path) -> None:
    assert not is_resuming(config(tmp_path / "none")) and find_checkpoint(config(tmp_path / "none")) is None


def test_resume_never_does_not_resume(run: Path) -> None:
    assert not is_resuming(config(run, resume="never"))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 4},
        {"steps": 400},
        {"threads": 3},
        {"placement": {"pools": {"other": [2]}, "roles": {"actor": "other"}}},
        {"checkpoint": {"every": 7, "keep_last": None, "asynchronous": False}},
        actor(engine={"max_tokens_per_microbatch": 5, "packing": "never", "strategy": "ddp"}),
        {"call_timeout_s": None, "backend": "inline"},
    ],
)
def test_settings_that_do_not_affect_results_may_differ(run: Path, changes: dict[str, Any]) -> None:
    assert is_resuming(config(run, **changes))


def test_a_moved_folder_resumes(run: Path) -> None:
    assert is_resuming(config(run.rename(run.with_name("moved"))))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (actor(optimizer={"lr": 1e-2}), ("actor.optimizer.lr", 0.001, 0.01)),
        ({"seed": 1, "batch_size": 5}, ("seed", 0, 1)),
        (actor(model={"path": "n"}), ("actor.model.path", "m", "n")),
        (
            actor(optimizer={"lr": 1e-3, "betas": [0.9, 0.99]}),
            ("actor.optimizer.betas", 0.9, 0.999, 0.99),
        ),
    ],
)
def test_a_changed_setting_is_rejected_with_its_key(
    run: Path, changes: dict[str, Any], facts: tuple[object, ...]
) -> None:
    assert not missing_facts(error_of(config(run, **changes)), *facts)


def test_all_changed_settings_are_rejected_together(run: Path) -> None:
    with rejects("batch_size", 4, 8, "seed", 0, 3, error=RunFolderError):
        is_resuming(config(run, batch_size=8, seed=3))


def test_more_steps_must_not_change_the_schedule_of_the_learning_rate(run: Path) -> None:
    linear = {"lr": 1e-3, "schedule": "linear"}
    (run / "config.yaml").write_text(to_yaml(config(run, **actor(optimizer=linear))))
    longer = config(run, steps=20, **actor(optimizer=linear))
    assert not missing_facts(error_of(longer), "actor.optimizer.total_steps", 10, 20)
    assert is_resuming(config(run, steps=20, **actor(optimizer=linear | {"total_steps": 10})))


def test_a_longer_schedule_of_epochs_is_rejected_with_epochs_and_the_end_to_set(run: Path) -> None:
    linear = actor(optimizer={"lr": 1e-3, "schedule": "linear"})
    (run / "config.yaml").write_text(to_yaml(config(run, steps=0, epochs=1, **linear).with_steps(20)))
    longer = config(run, steps=0, epochs=2, **linear).with_steps(20)
    assert not missing_facts(error_of(longer), "epochs", "actor.optimizer.total_steps", 5, 10)
    end = actor(optimizer={"lr": 1e-3, "schedule": "linear", "total_steps": 5})
    assert is_resuming(config(run, steps=0, epochs=2, **end).with_steps(20))


def test_a_run_of_epochs_with_more_steps_is_rejected_with_epochs(run: Path) -> None:
    shorter = config(run, steps=0, epochs=1).with_steps(12)
    assert not missing_facts(error_of(shorter), "epochs", "steps", 3, 4)
    ended = finish(run, COMPLETE, steps=0, epochs=1).with_steps(16)
    (run / "config.yaml").write_text(to_yaml(ended))
    with rejects(run, 4, "epochs", error=RunComplete):
        find_checkpoint(ended)


def test_the_run_of_another_recipe_is_rejected_with_the_recipe_alone(run: Path) -> None:
    old, new = "recipes.dpo.config:DPOConfig", "recipes.sft.config:SFTConfig"
    (run / "config.yaml").write_text(to_yaml(config(run, recipe=old, seed=3)))
    message = error_of(config(run, recipe=new))
    assert old in message and new in message and "seed" not in message


def test_a_run_with_more_steps_is_rejected(run: Path) -> None:
    assert not missing_facts(error_of(config(run, steps=3)), "steps", 3, 4)


@pytest.mark.parametrize("result", ["summary.json", "model"])
def test_a_model_without_a_checkpoint_is_not_overwritten(tmp_path: Path, result: str) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(config(tmp_path)))
    assert is_resuming(config(tmp_path))
    (tmp_path / result).write_text("{}")
    assert str(tmp_path) in error_of(config(tmp_path))


def test_the_config_of_another_recipe_is_rejected(run: Path) -> None:
    (run / "config.yaml").write_text("pools: {}\n")
    assert "SFTConfig" in error_of(config(run))


@pytest.mark.parametrize(
    ("section", "unused"),
    [
        ("data", {"difficulty": {"candidates": 7}}),
        ("reward", {"head_seed": 3}),
        ("reward", {"components": [{"function": "rewards:score", "name": "own", "head_seed": 3}], "function": None}),
        ("actor", {"kl_loss_kind": "k1"}),
    ],
)
def test_a_recorded_setting_without_effect_counts_as_its_default(
    tmp_path: Path, section: str, unused: dict[str, Any]
) -> None:
    """Versions of flowrl that started the run accepted settings that are rejected now."""
    recorded = grpo_settings(output=str(tmp_path), resume="auto")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded | {section: recorded[section] | unused}))
    kept = {name: value for name, value in unused.items() if name in ("components", "function", "kl_loss_kind")}
    if "components" in kept:
        kept["components"] = [{"function": "rewards:score", "name": "own"}]
    assert is_resuming(GRPOConfig.model_validate(recorded | {section: recorded[section] | kept}))


def test_an_invalid_recorded_setting_is_rejected_with_its_line_value_and_fix(tmp_path: Path) -> None:
    settings = grpo_settings(output=str(tmp_path), resume="auto")
    recorded = settings | {"actor": settings["actor"] | {"kl_loss_kind": "k1", "kl_loss_coef": 0.1}}
    text = yaml.safe_dump(recorded)
    (tmp_path / "config.yaml").write_text(text)
    line = text.splitlines().index("  kl_loss_kind: k1") + 1
    facts = (f"{tmp_path}/config.yaml:{line}", "kl_loss_kind", "k1", "kl_loss_gradient", "k2")
    with rejects(*facts, error=RunFolderError):
        is_resuming(GRPOConfig.model_validate(settings))


def test_config_differences_include_nested_and_missing_keys() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "removed": 4}
    new = {"a": 1, "b": {"c": 5, "d": 3, "e": 6}}
    assert [key for key, _, _ in differences(old, new)] == ["b.c", "b.e", "removed"]


COMPLETE = {"steps": 4, "steps_requested": 4, "interrupted_by": None}


def finish(run: Path, summary: Mapping[str, Any], **changes: Any) -> SFTConfig:
    """Writes the files of a run that has ended. Returns its config."""
    ended = config(run, **{"steps": 4} | changes)
    (run / "config.yaml").write_text(to_yaml(ended))
    (run / "summary.json").write_text(json.dumps(summary))
    return ended


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_complete_run_is_reported(run: Path, has_checkpoint: bool) -> None:
    ended = finish(run, COMPLETE)
    if not has_checkpoint:
        Checkpoints(run).prune(0, 0)
    with rejects(run, 4, error=RunComplete):
        find_checkpoint(ended)


def test_a_run_that_ended_with_its_data_is_complete(run: Path) -> None:
    with pytest.raises(RunComplete):
        find_checkpoint(finish(run, COMPLETE | {"steps_requested": 9}, steps=9))


@pytest.mark.parametrize(
    "summary", [COMPLETE | {"interrupted_by": "SIGINT"}, COMPLETE | {"steps": 3}, COMPLETE | {"steps_requested": 9}]
)
def test_a_run_without_all_its_results_is_not_complete(run: Path, summary: dict[str, Any]) -> None:
    assert is_resuming(finish(run, summary))


def test_a_complete_run_continues_with_more_steps(run: Path) -> None:
    assert is_resuming(finish(run, COMPLETE).model_copy(update={"steps": 5}))


def test_a_run_that_was_continued_and_killed_is_not_complete(run: Path) -> None:
    longer = finish(run, COMPLETE).model_copy(update={"steps": 5})
    (run / "config.yaml").write_text(to_yaml(longer))
    assert is_resuming(longer) and is_resuming(longer.model_copy(update={"steps": 4}))


def test_one_step_off_is_rejected_if_the_next_step_has_no_pending_rollouts(tmp_path: Path) -> None:
    schedule = {"kind": "one_step_off"}
    settings = ppo_settings(output=tmp_path, resume="auto", steps=9, schedule=schedule)
    config = PPOConfig.model_validate(settings)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    checkpoint(tmp_path, 4, {"rows": None})
    with rejects("steps", 9, 4, 5, error=CheckpointError):
        find_checkpoint(config)
    checkpoint(tmp_path, 5, {"rows": ["response"]})
    newest = find_checkpoint(config)
    assert newest is not None and newest.manifest.step == 5
