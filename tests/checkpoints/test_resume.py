"""What may go on in the folder of an earlier run, and what is refused by the first key that differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints, Role, new_manifest
from flowrl.checkpoints.input_checksums import input_checksums
from flowrl.checkpoints.resume import differences, found, is_resuming
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import RunConfig, to_yaml
from flowrl.data.checksums import write_json_with_checksum
from recipes.sft.config import SFTConfig


def config(folder: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output": folder,
        "resume": "auto",
        "steps": 10,
        "model": {"path": "m"},
        "optimizer": {"lr": 1e-3},
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
    """The folder of a run that has come to step 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config(folder)))
    checkpoint(folder, 4)
    return folder


def refused(changed: RunConfig) -> str:
    with pytest.raises(RunFolderError) as caught:
        is_resuming(changed)
    return str(caught.value)


def test_a_run_goes_on_after_the_newest_checkpoint_of_its_folder(run: Path) -> None:
    left = Checkpoints(run).begin(6, ["actor"])
    newest = found(config(run))
    assert newest is not None and newest.manifest.step == 4
    assert not left.exists()


@pytest.fixture
def with_inputs(run: Path, tmp_path: Path) -> SFTConfig:
    """A run that read a file, and trains an adapter on a model of two files."""
    (tmp_path / "t.jsonl").write_text("rows")
    (tmp_path / "m").mkdir()
    for name in ("a", "b"):
        (tmp_path / "m" / f"{name}.safetensors").write_bytes(b"weights")
    data = {"train": tmp_path / "t.jsonl", "max_prompt_tokens": 8}
    made = config(run, data=data, model={"path": tmp_path / "m"}, lora={"rank": 2})
    (run / "config.yaml").write_text(to_yaml(made))
    checkpoint(run, 5, {"inputs": input_checksums(made)})
    return made


def test_inputs_that_are_what_they_were_are_gone_on_with(with_inputs: SFTConfig) -> None:
    newest = found(with_inputs)
    assert newest is not None and newest.manifest.step == 5
    assert set(input_checksums(with_inputs)) == {"data.train", "model.path"}


@pytest.mark.parametrize(
    ("changed", "contents", "sentence"),
    [
        ("t.jsonl", "swor", r"what lies at data\.train is not .* at step 5 \(other contents of the same size\)"),
        ("t.jsonl", "row", r"what lies at data\.train is not .* \(3 bytes, then 4\), .*: put it back, or set output"),
        ("m/b.safetensors", "Weights", r"what lies at model\.path is not what the run in .* had at step 5"),
    ],
)
def test_inputs_that_have_changed_are_refused(
    with_inputs: SFTConfig, tmp_path: Path, changed: str, contents: str, sentence: str
) -> None:
    (tmp_path / changed).write_text(contents)
    with pytest.raises(RunFolderError, match=sentence):
        found(with_inputs)


def test_a_model_that_is_trained_as_a_whole_is_no_input(with_inputs: SFTConfig) -> None:
    assert set(input_checksums(with_inputs.model_copy(update={"lora": None}))) == {"data.train"}


@pytest.mark.parametrize("place", [0, 335, 999])
def test_a_large_file_is_summed_in_pieces_of_all_of_it(
    with_inputs: SFTConfig, tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.checkpoints.input_checksums._PIECE", 10)
    monkeypatch.setattr("flowrl.checkpoints.input_checksums._WHOLE", 100)
    weights = bytearray(1000)
    (tmp_path / "m" / "a.safetensors").write_bytes(weights)
    before = input_checksums(with_inputs)
    weights[place] = 1
    (tmp_path / "m" / "a.safetensors").write_bytes(weights)
    assert input_checksums(with_inputs) != before


def test_a_new_folder_is_begun_in(tmp_path: Path) -> None:
    assert not is_resuming(config(tmp_path / "none")) and found(config(tmp_path / "none")) is None


def test_never_is_never(run: Path) -> None:
    assert not is_resuming(config(run, resume="never"))


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
    assert is_resuming(config(run, **changes))


def test_a_folder_that_was_moved_goes_on(run: Path) -> None:
    assert is_resuming(config(run.rename(run.with_name("moved"))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {"lr": 1e-2}}, "has optimizer.lr 0.001, and this one 0.01, which changes its numbers: set it"),
        ({"seed": 1, "batch_size": 5}, "has seed 0, and this one 1"),
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
    assert is_resuming(config(tmp_path))
    (tmp_path / "summary.json").write_text("{}")
    assert "is over and has no checkpoint to go on from" in refused(config(tmp_path))


def test_the_config_of_another_recipe_is_refused(run: Path) -> None:
    (run / "config.yaml").write_text("pools: {}\n")
    assert "is no config of SFTConfig" in refused(config(run))


def test_differences_are_found_in_groups_and_on_either_side() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "gone": 4}
    new = {"a": 1, "b": {"c": 5, "d": 3, "e": 6}}
    assert [key for key, _, _ in differences(old, new)] == ["b.c", "b.e", "gone"]
