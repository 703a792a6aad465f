"""Checkpoints that cannot be read or written end with exit code 2 and one line, and leave intact ones unchanged."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flowrl.checkpoints.checkpoints import manifest_crc32
from flowrl.checkpoints.run_folder import folder_lock
from flowrl.cli import main, run_recipe
from flowrl.config import to_yaml
from flowrl.data.checksums import checksum_of
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train
from tests.errors import missing_facts
from tests.full_disk import file_size_limit
from tests.recipes.conftest import build_ppo_config


@pytest.fixture(scope="module")
def workspace(task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder `work` with a config and a model; `work.trained` next to it has a run of two steps, too."""
    folder = tmp_path_factory.mktemp("checkpoints") / "work"
    shutil.copytree(task_folder / "model", folder / "model")
    settings = {"steps": 2, "checkpoint": {"every": 1}, "resume": "auto"}
    config = build_ppo_config(task_folder, folder / "run", recipe="recipes.ppo.config:PPOConfig", **settings)
    (folder / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(folder, folder.with_suffix(".empty"))
    assert run_recipe(PPOConfig, train, arguments(folder)) == 0
    shutil.copytree(folder, folder.with_suffix(".trained"))
    return folder


def arguments(folder: Path, *overrides: str) -> list[str]:
    paths = [f"{role}.model.path={folder / 'model'}" for role in ("actor", "critic")]
    return [str(folder / "config.yaml"), *paths, *overrides]


def restore(workspace: Path, state: str) -> None:
    shutil.rmtree(workspace)
    shutil.copytree(workspace.with_suffix(state), workspace)


@pytest.fixture
def run(workspace: Path) -> Callable[..., int]:
    """Returns a function that runs the recipe (two steps by default) and returns the exit code."""
    restore(workspace, ".empty")
    return lambda *overrides: run_recipe(PPOConfig, train, arguments(workspace, *overrides))


@pytest.fixture
def checkpoints(run: Callable[..., int], workspace: Path) -> Path:
    """Returns the checkpoint folder of a run of two steps."""
    restore(workspace, ".trained")
    return workspace / "run" / "checkpoints"


Rejection = Callable[..., str]


@pytest.fixture
def rejection(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Rejection:
    """Returns a function that resumes for a third step, expects exit code 2, and returns the error line."""

    def resume(*overrides: str) -> str:
        capsys.readouterr()
        assert run("steps=3", *overrides) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return resume


def checksums(folder: Path) -> dict[str, tuple]:
    return {str(path.relative_to(folder)): checksum_of(path) for path in folder.rglob("*") if path.is_file()}


def write_manifest(path: Path, changes: dict[str, Any]) -> None:
    """Changes values of a manifest, with a correct checksum."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values | {"crc32": manifest_crc32(values)}))


def test_changed_step_in_the_manifest_is_rejected(checkpoints: Path, rejection: Rejection) -> None:
    manifest = checkpoints / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    assert not missing_facts(rejection(), "manifest.json")


def test_complete_run_is_reported_and_unchanged(
    checkpoints: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    for changes in ((), ("backend=ray", "evaluate_every=1")):
        assert run(*changes) == 0
        printed = capsys.readouterr()
        assert not missing_facts(printed.out, folder, 2) and not printed.err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_truncated_file_is_named_and_the_older_checkpoint_resumes(
    checkpoints: Path, rejection: Rejection, run: Callable[..., int]
) -> None:
    shard = checkpoints / "step-000002" / "critic" / "rank-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = checksums(checkpoints)
    error = rejection().replace(",", "")
    assert not missing_facts(error, shard.parents[1], "critic/rank-00000.bin", 3975555, 3975556, 1)
    assert checksums(checkpoints) == before
    shutil.rmtree(checkpoints / "step-000002")
    assert run("steps=3") == 0


def test_changed_byte_is_rejected(checkpoints: Path, rejection: Rejection) -> None:
    shard = checkpoints / "step-000002" / "actor" / "rank-00000.bin"
    before = checksum_of(shard).crc32
    data = bytearray(shard.read_bytes())
    data[1_000_000] ^= 1
    shard.write_bytes(data)
    crcs = (f"{before:08x}", f"{checksum_of(shard).crc32:08x}")
    assert not missing_facts(rejection(), shard.parents[1], "actor/rank-00000.bin", *crcs, 1)


@pytest.mark.slow
def test_missing_shard_is_rejected(checkpoints: Path, rejection: Rejection) -> None:
    shard = checkpoints / "step-000002" / "actor" / "rank-00000.bin"
    shard.unlink()
    error = rejection()
    assert not missing_facts(error, shard.parents[1], "actor/rank-00000.bin", 1)
    assert os.strerror(errno.ENOENT) in error


@pytest.mark.parametrize(("version", "facts"), [(1, ("output",)), (4, (1, 2, 3))])
def test_other_format_is_rejected(
    checkpoints: Path, rejection: Rejection, version: int, facts: tuple[object, ...]
) -> None:
    """Format 1 lacks pending rollouts, so a run that generates needs a new output. Format 4 cannot be read at all."""
    manifest = checkpoints / "step-000002" / "manifest.json"
    write_manifest(manifest, {"format": version})
    assert not missing_facts(rejection(), manifest.parent, "format", version, *facts)


@pytest.mark.parametrize(
    ("name", "changes"), [("config.json", {"rms_norm_eps": 0.1}), ("generation_config.json", {"eos_token_id": 5})]
)
def test_a_changed_config_of_the_model_is_rejected(
    name: str, changes: dict[str, Any], checkpoints: Path, rejection: Rejection, workspace: Path
) -> None:
    file = workspace / "model" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    before = checksums(checkpoints)
    assert not missing_facts(rejection(), "actor.model.path", workspace / "run", "output")
    assert checksums(checkpoints) == before


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_full_disk_leaves_earlier_checkpoints_unchanged(
    checkpoints: Path, rejection: Rejection, run: Callable[..., int], asynchronous: str
) -> None:
    before = checksums(checkpoints)
    with file_size_limit(3_000_000):
        error = rejection(f"checkpoint.asynchronous={asynchronous}", "steps=4")
    assert not missing_facts(error, checkpoints / "step-000003" / "actor", "output")
    assert os.strerror(errno.EFBIG) in error
    assert checksums(checkpoints) == before
    assert run("steps=3") == 0


def test_checkpoint_folder_that_cannot_be_created_is_named(
    checkpoints: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str], workspace: Path
) -> None:
    shutil.rmtree(checkpoints)
    shutil.rmtree(workspace / "run" / "model")
    (workspace / "run" / "summary.json").unlink()
    checkpoints.write_text("")
    capsys.readouterr()
    assert run() == 2
    error = capsys.readouterr().err
    assert not missing_facts(error, checkpoints / "step-000001", "output")
    assert os.strerror(errno.ENOTDIR) in error


@pytest.mark.slow
def test_run_folder_in_use_is_rejected_and_unchanged(
    checkpoints: Path, run: Callable[..., int], rejection: Rejection, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.parent
    with folder_lock(folder):
        (checkpoints / "step-000003").mkdir()  # as while a checkpoint is being saved
        before = checksums(folder)
        for resume in ("auto", "never"):
            assert not missing_facts(rejection(f"resume={resume}"), "output", folder, os.getpid())
        assert checksums(folder) == before and (checkpoints / "step-000003").exists()
        assert main(["checkpoints", str(folder)]) == 0 and main(["export", str(folder)]) == 0
    assert run("steps=3") == 0


def test_checkpoints_are_listed_and_exported_from_the_command_line(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.parent
    capsys.readouterr()
    assert main(["checkpoints", str(folder)]) == 0
    steps = re.findall(r"^\W*(\d+)\b.*\bcomplete\b", capsys.readouterr().out, re.MULTILINE)
    assert sorted(steps) == ["1", "2"]
    assert main(["export", str(folder), "--step", "2"]) == 0
    exported = folder / "export-step-000002" / "model.safetensors"
    assert exported.read_bytes() == (folder / "model" / "model.safetensors").read_bytes()
    critic = folder / "critic"
    assert main(["export", str(folder), "--role", "critic", "--output", str(critic)]) == 0
    assert "score.bias" in load_file(critic / "model.safetensors") and "critic" in (critic / "README.md").read_text()
    assert main(["export", str(folder), "--adapter"]) == 2
    assert not missing_facts(capsys.readouterr().err, checkpoints / "step-000002" / "actor", "--adapter", "lora")
    assert main(["export", str(folder), "--step", "7"]) == 2
    assert not missing_facts(capsys.readouterr().err, folder, 7, 1, 2)


@pytest.mark.slow
def test_export_names_the_path_that_it_cannot_write_or_read(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = checkpoints.parent, checkpoints / "step-000002" / "actor" / "model" / "config.json"
    capsys.readouterr()
    (folder / "file").touch()
    for output, number in ((folder / ("f" * 300), errno.ENAMETOOLONG), (folder / "file" / "out", errno.ENOTDIR)):
        assert main(["export", str(folder), "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert not missing_facts(error, output) and os.strerror(number) in error
        assert ("--output" in error) == (number == errno.ENAMETOOLONG)
    config.write_text("{")
    manifest = checkpoints / "step-000002" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    write_manifest(manifest, {"files": files | {"actor/model/config.json": checksum_of(config)}})
    assert main(["export", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not missing_facts(error, checkpoints / "step-000002", "--step")
    assert str(config) in error
    assert not (folder / "export-step-000002").exists()
