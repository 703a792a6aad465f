"""Checkpoints that cannot be read or written: one sentence, exit code 2, and what was whole before is whole after."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.checkpoints.run_folder import folder_lock
from flowrl.cli import main, run_recipe
from flowrl.config import to_yaml
from flowrl.data.checksums import checksum_of
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train


@pytest.fixture
def run(ppo_config: Callable[..., PPOConfig], task_folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs the recipe on a copy of the model, two steps unless told otherwise; returns the exit code."""
    model = tmp_path / "model"
    shutil.copytree(task_folder / "model", model)
    config = ppo_config(recipe="recipes.ppo.config:PPOConfig", steps=2, checkpoint={"every": 1}, resume="auto")
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    def start(*overrides: str) -> int:
        paths = [f"{role}.model.path={model}" for role in ("actor", "critic")]
        return run_recipe(PPOConfig, train, [str(tmp_path / "config.yaml"), *paths, *overrides])

    return start


@pytest.fixture
def checkpoints(run: Callable[..., int], tmp_path: Path) -> Path:
    """What a run of two steps has left."""
    assert run() == 0
    return tmp_path / "run" / "checkpoints"


Refused = Callable[..., str]


@pytest.fixture
def refused(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Refused:
    """The sentence with which going on to a third step is refused."""

    def start(*overrides: str) -> str:
        capsys.readouterr()
        assert run("steps=3", *overrides) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1
        return told

    return start


def sums(folder: Path) -> dict[str, tuple]:
    return {str(path.relative_to(folder)): checksum_of(path) for path in folder.rglob("*") if path.is_file()}


def test_a_truncated_file_is_refused_by_name_and_the_older_checkpoint_goes_on(
    checkpoints: Path, refused: Refused, run: Callable[..., int]
) -> None:
    shard = checkpoints / "step-000002" / "critic" / "rank-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = sums(checkpoints)
    assert "critic/rank-00000.bin has 3,975,555 bytes and had 3,975,556; remove the folder to go on from s" in refused()
    assert sums(checkpoints) == before
    shutil.rmtree(checkpoints / "step-000002")
    assert run("steps=3") == 0


def test_a_changed_byte_is_refused(checkpoints: Path, refused: Refused) -> None:
    shard = checkpoints / "step-000002" / "actor" / "rank-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1_000_000] ^= 1
    shard.write_bytes(data)
    assert "actor/rank-00000.bin has changed since it was written" in refused()


def test_a_missing_shard_is_refused(checkpoints: Path, refused: Refused) -> None:
    (checkpoints / "step-000002" / "actor" / "rank-00000.bin").unlink()
    assert "actor/rank-00000.bin cannot be read (No such file or directory)" in refused()


def test_a_newer_format_is_refused(checkpoints: Path, refused: Refused) -> None:
    manifest = checkpoints / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    assert "has format 3, and this version reads 1 and 2" in refused()


def test_a_format_without_rows_that_were_not_trained_is_refused_where_a_run_generates(
    checkpoints: Path, refused: Refused
) -> None:
    manifest = checkpoints / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    assert "has format 1, which says nothing of responses that were generated and not trained: go on" in refused()


def test_another_model_in_the_same_place_is_refused(checkpoints: Path, refused: Refused, tmp_path: Path) -> None:
    config = Qwen2Config.from_pretrained(tmp_path / "model")
    config.intermediate_size = 128
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    before = sums(checkpoints)
    told = refused()
    assert "actor: the checkpoint in" in told and "is of another model: model.language_model.model.layers.0.mlp" in told
    assert "float32 [256, 128] there and float32 [128, 128] here" in told
    assert sums(checkpoints) == before


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """What a full disk does: a write beyond it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoints_before(
    checkpoints: Path, refused: Refused, run: Callable[..., int], asynchronous: str
) -> None:
    before = sums(checkpoints)
    with files_up_to(3_000_000):
        told = refused(f"checkpoint.asynchronous={asynchronous}", "steps=4")
    assert "step-000003/actor (File too large); make room or set output to another disk" in told
    assert sums(checkpoints) == before
    assert run("steps=3") == 0


def test_a_folder_that_cannot_be_made_is_one_sentence(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    assert run() == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "checkpoints").write_text("")
    capsys.readouterr()
    assert run() == 2
    assert "checkpoints/step-000001 (Not a directory); make room or set output to a folder" in capsys.readouterr().err


def test_a_run_beside_a_live_one_is_refused_and_changes_nothing(
    checkpoints: Path, run: Callable[..., int], refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.parent
    with folder_lock(folder):
        (checkpoints / "step-000003").mkdir()  # it is being saved
        before = sums(folder)
        for resume in ("auto", "never"):
            told = refused(f"resume={resume}")
            assert f"output folder {folder} is in use by the run of process {os.getpid()} on" in told
        assert sums(folder) == before and (checkpoints / "step-000003").exists()
        assert main(["checkpoints", str(folder)]) == 0 and main(["export", str(folder)]) == 0
    assert run("steps=3") == 0


def test_the_checkpoints_are_listed_and_exported_from_the_command_line(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.parent
    capsys.readouterr()
    assert main(["checkpoints", str(folder)]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["export", str(folder), "--step", "2"]) == 0
    exported = folder / "export-step-000002" / "model.safetensors"
    assert exported.read_bytes() == (folder / "model" / "model.safetensors").read_bytes()
    assert main(["export", str(folder), "--adapter"]) == 2
    assert "has no adapter, because its run trained all weights" in capsys.readouterr().err
    assert main(["export", str(folder), "--step", "7"]) == 2
    assert capsys.readouterr().err.endswith("run has no checkpoint of step 7; it has 1, 2\n")


def test_an_export_tells_what_it_cannot_read_from_what_it_cannot_write(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = checkpoints.parent, checkpoints / "step-000002" / "actor" / "model" / "config.json"
    capsys.readouterr()
    (folder / "file").touch()
    for output, told in (
        (folder / ("f" * 300), f"error: --output {folder}/{'f' * 300} cannot be written (File name too long); name"),
        (folder / "file" / "out", f"error: {folder}/file/out cannot be written (Not a directory): make room, or name"),
    ):
        assert main(["export", str(folder), "--output", str(output)]) == 2
        assert capsys.readouterr().err.startswith(told)
    config.write_text("{")
    manifest = checkpoints / "step-000002" / "manifest.json"
    said = json.loads(manifest.read_text())
    said["files"]["actor/model/config.json"] = checksum_of(config)
    manifest.write_text(json.dumps(said))
    assert main(["export", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: checkpoint {checkpoints}/step-000002 cannot be read (") and told.count("\n") == 1
    assert str(config) in told and told.endswith("; choose another one with --step\n")
    assert not (folder / "export-step-000002").exists()
