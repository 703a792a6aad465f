"""Checkpoints on disk: commit, verification and pruning."""

import errno
import json
import math
import os
import shutil
import zlib
from pathlib import Path

import pytest

from flowrl.checkpoints.checkpoints import (
    Checkpoint,
    Checkpoints,
    Role,
    Score,
    checksum_remaining_files,
    new_manifest,
    steps_to_keep,
)
from flowrl.data.checksums import CheckpointError, write_with_checksum
from tests.errors import missing_facts


def save(run: Path, step: int, score: Score | None = None) -> Path:
    """Writes a complete checkpoint of one role with two files."""
    checkpoints = Checkpoints(run)
    folder = checkpoints.begin(step, ["actor"])
    files = {"driver.json": write_with_checksum(folder / "driver.json", b'{"step": 1}')}
    files["actor/a"] = write_with_checksum(folder / "actor" / "a", b"weights")
    checkpoints.commit(step, new_manifest(step, score, {"actor": Role(2, "Tiny")}, {"torch": "2"}, files))
    return folder


def accuracy(value: float) -> Score:
    return Score("accuracy", value)


def test_a_saved_checkpoint_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 40, accuracy(0.5))
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and newest.path == tmp_path / "checkpoints" / "step-000040"
    manifest = newest.manifest
    assert (manifest.step, manifest.score, manifest.num_bytes) == (40, accuracy(0.5), 18)
    assert manifest.roles == {"actor": Role(2, "Tiny")} and manifest.versions == {"torch": "2"}
    assert newest.driver() == {"step": 1} and newest.role("actor") == newest.path / "actor"


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == [] and checkpoints.newest() is None
    checkpoints.remove_unfinished()
    with pytest.raises(CheckpointError, match=r"\bstep 4\b"):
        checkpoints.read(4)


def test_a_folder_without_a_manifest_is_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    unfinished = Checkpoints(tmp_path).begin(2, ["actor"])
    (unfinished / "manifest.json.tmp").write_text("half")
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None and newest.manifest.step == 1
    save(tmp_path, 3)
    assert not unfinished.exists() and Checkpoints(tmp_path).steps() == [1, 3]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, accuracy(0.1))
    save(tmp_path, 1, accuracy(0.2))
    assert Checkpoints(tmp_path).read(1).manifest.score == accuracy(0.2)


def test_a_role_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"\bcritic\b"):
        Checkpoints(tmp_path).read(1).role("critic")


def error_of_newest(run: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(run).newest()
    return str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "actor" / "a").write_bytes(b"weigh")
    assert not missing_facts(error_of_newest(tmp_path), tmp_path / "checkpoints/step-000001", "actor/a", 5, 7)


def test_a_changed_file_is_named_with_the_step_to_resume_from(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "actor" / "a"
    crc32 = zlib.crc32(file.read_bytes())
    file.write_bytes(b"Weights")
    facts = (file.parents[1], "actor/a", f"{crc32:08x}", f"{zlib.crc32(b'Weights'):08x}", 1)
    assert not missing_facts(error_of_newest(tmp_path), *facts)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "actor" / "a").unlink()
    message = error_of_newest(tmp_path)
    assert "actor/a" in message and os.strerror(errno.ENOENT) in message


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, "[]", "{}", '{"format": 1}'])
def test_a_corrupt_manifest_is_an_error_and_not_removed(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_text(text)
    assert "manifest.json" in error_of_newest(tmp_path)
    save(tmp_path, 2)
    Checkpoints(tmp_path).prune(1, 0)
    assert folder.exists()


def test_a_newer_format_is_an_error_and_not_removed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    value = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(value | {"format": 4}))
    assert not missing_facts(error_of_newest(tmp_path), "format", 4)
    Checkpoints(tmp_path).remove_unfinished()
    assert folder.exists()


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 10, accuracy(0.5)) / "manifest.json"
    written = path.read_bytes()
    intact = Checkpoints(tmp_path).read(10)
    for position in range(len(written)):
        for bit in range(8):
            flipped = bytearray(written)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                read = Checkpoints(tmp_path).read(10)
            except CheckpointError:
                continue
            assert read == intact, f"bit {bit} of {written[position - 20 : position + 20]!r}"


def test_an_older_manifest_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    value = json.loads(path.read_text())
    del value["crc32"]
    path.write_text(json.dumps(value))
    assert "crc" in error_of_newest(tmp_path) or "checksum" in error_of_newest(tmp_path)
    path.write_text(json.dumps(value | {"format": 2}))
    assert Checkpoints(tmp_path).read(1).manifest.step == 1


def test_a_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="step-000001"):
        Checkpoints(tmp_path).begin(1, ["actor"])


@pytest.mark.parametrize(
    ("scores", "last", "best", "expected"),
    [
        ({1: None, 2: None, 3: None}, 2, 0, {2, 3}),
        ({1: None, 2: None, 3: None}, None, 0, {1, 2, 3}),
        ({1: accuracy(0.9), 2: accuracy(0.1), 3: accuracy(0.2)}, 1, 1, {1, 3}),
        ({1: accuracy(0.9), 2: accuracy(0.9), 3: accuracy(0.2)}, 1, 1, {2, 3}),
        ({1: Score("loss", 0.1), 2: Score("loss", 0.5), 3: Score("loss", 0.2)}, 1, 1, {1, 3}),
        ({1: Score("validation_loss", 0.1), 2: Score("validation_loss", 0.5), 3: None}, 1, 1, {1, 3}),
        ({1: Score("reward", 9.0), 2: accuracy(0.1), 3: accuracy(0.2)}, 1, 2, {1, 2, 3}),
        ({4: Score("reward", 0.9), 8: Score("reward", 0.1), 12: accuracy(0.5)}, 1, 1, {4, 12}),
        ({1: accuracy(float("nan")), 2: accuracy(0.0), 3: None}, 1, 1, {2, 3}),
        ({1: accuracy(0.5)}, 5, 5, {1}),
        ({}, 1, 1, set()),
    ],
)
def test_the_newest_and_the_best_are_kept(scores: dict, last: int | None, best: int, expected: set[int]) -> None:
    assert steps_to_keep(scores, last, best) == expected


def test_pruning_removes_all_other_checkpoints(tmp_path: Path) -> None:
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.2)):
        save(tmp_path, step, accuracy(value))
    Checkpoints(tmp_path).prune(1, 1)
    assert Checkpoints(tmp_path).steps() == [2, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_the_first_score_of_a_step_is_used() -> None:
    names = ("reward", "loss")
    assert Score.of({"loss": 1.0, "reward": 2.0, "accuracy": 3.0}, names) == Score("reward", 2.0)
    assert Score.of({"loss": 1.0}, names) == Score("loss", 1.0) and Score.of({"lr": 1.0}, names) is None


def test_failed_rewards_count_as_the_worst_score() -> None:
    """The accuracy over the other responses is not comparable with that of another checkpoint."""
    values = {"accuracy": 0.9, "evaluation/failed_as_worst": 0.6, "evaluation/failed_as_best": 0.95}
    assert Score.of(values, ("accuracy",)) == Score("accuracy", 0.6)
    assert Score.of(values | {"accuracy": math.nan}, ("accuracy",)) == Score("accuracy", 0.6)


def test_files_without_a_known_checksum_are_read(tmp_path: Path) -> None:
    known = {"a": write_with_checksum(tmp_path / "a", b"1")}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "b").write_bytes(b"2")
    checksums = checksum_remaining_files(tmp_path, known)
    assert checksums.keys() == {"a", "own/b"} and checksums["own/b"].size == 1


def test_a_copied_run_keeps_its_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    newest = Checkpoints(tmp_path / "copy").newest()
    assert isinstance(newest, Checkpoint) and newest.path.is_relative_to(tmp_path / "copy")
