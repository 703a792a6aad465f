"""The model of a model folder, a run, a checkpoint or an adapter."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.cli import main
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.data.checksums import CheckpointError
from flowrl.engines.models.adapters.lora import LoraError
from flowrl.inference.model_source import ModelSourceError, resolve_model
from tests.engines.tiny import llama, qwen2, save
from tests.errors import rejects
from tests.slow_cases import slow

WEIGHTS = "model.safetensors"


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def adapter(lora_folder: Path, tmp_path: Path) -> Path:
    assert main(["export", str(lora_folder), "--adapter", "--output", str(tmp_path / "adapter")]) == 0
    return tmp_path / "adapter"


def test_a_run_stands_for_its_model_and_a_step_for_the_checkpoint(run_folder: Path) -> None:
    final = resolve_model(str(run_folder))
    assert (final.kind, final.name, final.path) == ("run", "full", run_folder / "model")
    last, first = (resolve_model(str(run_folder), step=step) for step in (2, 1))
    assert_same_weights(last.path, final.path)
    with pytest.raises(AssertionError):
        assert_same_weights(first.path, final.path)
    assert (first.kind, first.name) == ("run", "full/step-000001")
    assert (first.path / TEMPLATE_FILE).read_text() == (final.path / TEMPLATE_FILE).read_text()


def test_a_run_without_a_model_stands_for_its_newest_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "unfinished"
    shutil.copytree(run_folder, run, ignore=shutil.ignore_patterns("model.safetensors"))
    shutil.rmtree(run / "model")
    source = resolve_model(str(run))
    assert source.name == "unfinished/step-000002"
    assert_same_weights(source.path, run_folder / "model")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ModelSourceError, match="neither a saved model nor a checkpoint"):
        resolve_model(str(run))


def test_a_checkpoint_folder_is_exported_also_outside_of_its_run(run_folder: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(run_folder / "checkpoints/step-000002", tmp_path / "copied/checkpoint")
    source = resolve_model(str(checkpoint))
    assert source.kind == "checkpoint"
    assert_same_weights(source.path, run_folder / "model")
    (checkpoint / "driver.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"driver\.json"):
        resolve_model(str(checkpoint))


def test_an_adapter_is_merged_into_its_base_model(lora_folder: Path, task_folder: Path, adapter: Path) -> None:
    alone = resolve_model(str(adapter))
    added = resolve_model(str(task_folder / "model"), adapter=str(adapter))
    for source in (alone, added):
        assert (source.adapter, source.name) == (adapter, "model+adapter")
        assert_same_weights(source.path, lora_folder / "model")


def test_an_adapter_of_another_model_is_rejected(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="does not match"):
        resolve_model(str(save(qwen2(), tmp_path / "other")), adapter=str(adapter))
    with pytest.raises(LoraError, match="does not match"):
        resolve_model(str(save(llama(), tmp_path / "llama")), adapter=str(adapter))


def test_an_adapter_with_weights_that_are_not_finite_is_rejected(task_folder: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = min(weights)
    weights[name][0, 0] = float("inf")
    save_file(weights, file, {"format": "pt"})
    with rejects(name, 1) as caught:
        resolve_model(str(task_folder / "model"), adapter=str(adapter))
    assert str(file) in str(caught.value)


def test_an_incomplete_adapter_is_rejected(task_folder: Path, adapter: Path) -> None:
    base = str(task_folder / "model")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    dropped = next(iter(weights))
    save_file({name: weight for name, weight in weights.items() if name != dropped}, file, {"format": "pt"})
    with pytest.raises(LoraError, match=dropped):
        resolve_model(base, adapter=str(adapter))
    file.unlink()
    with pytest.raises(LoraError, match="cannot be read"):
        resolve_model(base, adapter=str(adapter))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(ModelSourceError, match="names no base model"):
        resolve_model(str(adapter))


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "incomplete"])
def test_a_path_without_a_model_is_rejected(kind: str, tmp_path: Path) -> None:
    path = tmp_path / {"incomplete": "step-000004"}.get(kind, kind)
    if kind == "file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
    with pytest.raises(ModelSourceError, match="incomplete" if kind == "incomplete" else str(path)):
        resolve_model(str(path))


def test_a_step_applies_to_runs_only(run_folder: Path) -> None:
    with pytest.raises(ModelSourceError, match="run folder"):
        resolve_model(str(run_folder / "model"), step=1)
    with pytest.raises(CheckpointError, match="available: 1, 2"):
        resolve_model(str(run_folder), step=7)


RESOLVE = """
import os, signal, sys, time
from flowrl.cli import exit_code
from flowrl.inference.model_source import resolve_model
def program():
    source = resolve_model(sys.argv[1], step=1)
    assert (source.path / "model.safetensors").exists()
    if len(sys.argv) > 2:
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(600)
sys.exit(exit_code(program))
"""


def resolve(run_folder: Path, folder: Path, *signals: signal.Signals) -> int:
    """Resolves a checkpoint in another process, which then receives a signal. Returns the exit code."""
    command = [sys.executable, "-c", RESOLVE, str(run_folder), *(str(int(number)) for number in signals)]
    return subprocess.run(command, env={"TMPDIR": str(folder), "PATH": ""}, timeout=300, check=False).returncode


@pytest.mark.parametrize(("ending", "code"), [slow((), 0), slow((signal.SIGTERM,), 143), slow((signal.SIGHUP,), 129)])
def test_an_exported_checkpoint_is_deleted_at_the_end(
    run_folder: Path, tmp_path: Path, ending: tuple[signal.Signals, ...], code: int
) -> None:
    assert resolve(run_folder, tmp_path, *ending) == code
    assert list(tmp_path.glob("flowrl-*")) == []


@pytest.mark.slow
def test_the_next_program_deletes_the_exported_checkpoint_of_a_killed_one(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(run_folder, tmp_path, signal.SIGKILL) == -signal.SIGKILL
    (folder,) = tmp_path.glob("flowrl-model-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resolve_model(str(run_folder / "model"))
    assert not folder.exists()


KILLED = """
import os, signal
from flowrl.data.folders.private_folder import create_folder
folder = create_folder("model")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_program_deletes_the_folder_of_a_killed_one_and_exports_to_such_a_folder(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env={"TMPDIR": str(tmp_path), "PATH": ""}, timeout=300, check=False)
    (abandoned,) = tmp_path.glob("flowrl-model-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = resolve_model(str(run_folder), step=1)
    try:
        assert [folder.path for folder in source.folders] == list(tmp_path.glob("flowrl-model-*")) != [abandoned]
        assert source.path.is_relative_to(source.folders[0].path)
    finally:
        for folder in source.folders:
            folder.remove()


RESOLVE_FOR_CHILD = """
import os, signal, subprocess, sys
from flowrl.inference.model_source import resolve_model
source = resolve_model(sys.argv[1], step=1)
child = subprocess.Popen(["/bin/sleep", "600"], pass_fds=[folder.marker for folder in source.folders])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_child_that_inherits_the_marker_protects_the_folder_of_a_killed_process(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", RESOLVE_FOR_CHILD, str(run_folder)]
    with subprocess.Popen(command, env={"TMPDIR": str(tmp_path), "PATH": ""}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.wait(timeout=300)
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            resolve_model(str(run_folder / "model"))
            (folder,) = tmp_path.glob("flowrl-model-*")
        finally:
            os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        resolve_model(str(run_folder / "model"))
