"""What may go on in the folder of an earlier run, and what is refused by the first key that differs."""

from pathlib import Path
from typing import Any

import pytest

from flowrl.config import RunConfig, to_yaml
from flowrl.data.files import write_summed
from flowrl.run.checkpoints import Checkpoints, Role, new_manifest
from flowrl.run.folder import RunFolderError
from flowrl.run.resume import differences, found, goes_on
from recipes.sft.config import SFTConfig


def config(folder: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output": folder,
        "resume": "auto",
        "steps": 10,
        "model": {"path": "m"},
        "optimizer": {"lr": 1e-3},
        "data": {"train": "t.jsonl", "max_prompt_tokens": 8},
        "rows_per_step": 4,
    }
    return SFTConfig.model_validate(settings | changes)


def checkpoint(folder: Path, step: int) -> None:
    checkpoints = Checkpoints(folder)
    files = {"driver.json": write_summed(checkpoints.begin(step, ["actor"]) / "driver.json", b"{}")}
    checkpoints.commit(step, new_manifest(step, None, {"actor": Role(1, "")}, {}, files))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has come to step 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config(folder)))
    checkpoint(folder, 4)
    return folder


def refused(changed: RunConfig) -> str:
    with pytest.raises(RunFolderError) as caught:
        goes_on(changed)
    return str(caught.value)


def test_a_run_goes_on_after_the_newest_checkpoint_of_its_folder(run: Path) -> None:
    left = Checkpoints(run).begin(6, ["actor"])
    newest = found(config(run))
    assert newest is not None and newest.manifest.step == 4
    assert not left.exists()


def test_a_new_folder_is_begun_in(tmp_path: Path) -> None:
    assert not goes_on(config(tmp_path / "none")) and found(config(tmp_path / "none")) is None


def test_never_is_never(run: Path) -> None:
    assert not goes_on(config(run, resume="never"))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 4},
        {"steps": 400},
        {"threads": 3},
        {"placement": {"pools": {"other": [2]}, "roles": {"actor": "other"}}},
        {"checkpoint": {"every": 7, "keep_last": None, "asynchronous": False}},
        {"engine": {"max_tokens_per_microbatch": 5, "packing": "never", "strategy": "ddp"}},
        {"call_timeout_s": None, "backend": "inline"},
    ],
)
def test_what_changes_no_number_may_differ(run: Path, changes: dict[str, Any]) -> None:
    assert goes_on(config(run, **changes))


def test_a_folder_that_was_moved_goes_on(run: Path) -> None:
    assert goes_on(config(run.rename(run.with_name("moved"))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {"lr": 1e-2}}, "has optimizer.lr 0.001, and this one 0.01, which changes its numbers: set it"),
        ({"seed": 1, "rows_per_step": 5}, "has seed 0, and this one 1"),
        ({"model": {"path": "n"}}, "has model.path m, and this one n"),
        ({"epochs": 2}, "has epochs null, and this one 2"),
        (
            {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}},
            r"has optimizer.betas [0.9, 0.999], and this one [0.9, 0.99]",
        ),
    ],
)
def test_what_changes_a_number_is_refused_by_the_first_key(run: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(config(run, **changes))


def test_a_run_that_has_come_further_is_refused(run: Path) -> None:
    assert "steps is 3, but the run in" in refused(config(run, steps=3))
    assert refused(config(run, steps=3)).endswith("has come to step 4: set steps to 4 or more")


def test_a_run_that_is_over_and_saved_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(config(tmp_path)))
    assert goes_on(config(tmp_path))
    (tmp_path / "summary.json").write_text("{}")
    assert "is over and has no checkpoint to go on from" in refused(config(tmp_path))


def test_the_config_of_another_recipe_is_refused(run: Path) -> None:
    (run / "config.yaml").write_text("pools: {}\n")
    assert "is no config of SFTConfig" in refused(config(run))


def test_differences_are_found_in_groups_and_on_either_side() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "gone": 4}
    new = {"a": 1, "b": {"c": 5, "d": 3, "e": 6}}
    assert [key for key, _, _ in differences(old, new)] == ["b.c", "b.e", "gone"]
