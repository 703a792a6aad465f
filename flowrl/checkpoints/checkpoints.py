"""Reads, commits and prunes the checkpoints of a run on disk. Imports neither torch nor ray.

`checkpoints/step-000040/` has a folder per role, `driver.json` and `manifest.json`. It also has `rows.safetensors` if
there are pending rollouts (flowrl/checkpoints/saved_rows.py). The manifest lists the size and checksum of every other
file, and has a checksum of its own values. It is written last, so a folder without a manifest is an incomplete save.
The next save or resume removes incomplete saves.
"""

import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.config.source import InputFileError, read_json
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.data.checksums import CheckpointError, FileChecksum, checksum_of, sync_folder, write_json_with_checksum
from flowrl.data.metric import finite, held_out_bounds

FORMAT, ROWS_FORMAT = 3, 2
READS = (1, ROWS_FORMAT, FORMAT)
"""Checkpoint formats that can be read. Format 1 has no pending rollouts. Formats 1 and 2 have no checksum of the
manifest.
"""
MANIFEST, DRIVER = "manifest.json", "driver.json"

SCORES: Mapping[str, int] = {
    "accuracy": 1,
    "agreement": 1,
    "reward": 1,
    "validation_loss": -1,
    "loss": -1,
    "actor/loss": -1,
    "reward/loss": -1,
}
"""Metrics that rank checkpoints: 1 if higher is better, -1 if lower is better."""


@dataclass(frozen=True)
class Score:
    """Metric by which a checkpoint is ranked."""

    name: str
    value: float

    @classmethod
    def of(cls, values: Mapping[str, float], names: Sequence[str]) -> "Score | None":
        """Returns the first of the named metrics that a step has, or None.

        If rewards failed in the evaluation, returns the value with the worst score for failed rewards. The metric
        itself is a mean over different responses in each checkpoint, so it cannot rank checkpoints.
        """
        name = next((name for name in names if values.get(name) is not None), None)
        return None if name is None else cls(name, held_out_bounds(values, name)[0])

    @property
    def sort_key(self) -> float:
        """Key for sorting scores. The best score has the largest key, and NaN the smallest."""
        return -math.inf if math.isnan(self.value) else SCORES[self.name] * self.value


@dataclass(frozen=True)
class Role:
    """Entry of a role in the manifest."""

    world_size: int
    architecture: str


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`."""

    step: int
    saved_at_s: float
    score: Score | None
    roles: Mapping[str, Role]
    versions: Mapping[str, str]
    files: Mapping[str, FileChecksum]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, which is a folder with a manifest."""

    path: Path
    manifest: Manifest

    def role(self, name: str) -> Path:
        """Returns the folder of a role. Raises CheckpointError if the checkpoint does not contain the role."""
        if name not in self.manifest.roles:
            saved = ", ".join(self.manifest.roles)
            raise CheckpointError(f"checkpoint {self.path} has no role {name}; it has {saved}")
        return self.path / name

    def driver(self) -> dict[str, Any]:
        return read_json(self.path / DRIVER)

    def check(self) -> None:
        """Verifies the checksum of every file. Raises CheckpointError if a file is missing, truncated or changed."""
        largest_first = sorted(self.manifest.files, key=lambda name: -self.manifest.files[name].size)
        with ThreadPoolExecutor(count_usable_cpus()) as pool:
            problems = list(pool.map(lambda name: (name, self._problem(name)), largest_first))
        for name, problem in problems:
            if problem:
                raise CheckpointError(f"checkpoint {self.path} is corrupt: {name} {problem}")

    def _problem(self, name: str) -> str:
        """Returns an error message for a file, or an empty string if the file is intact."""
        path, expected = self.path / name, self.manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected.size:
                return f"has {size:,} bytes instead of {expected.size:,}"
            crc32 = checksum_of(path).crc32
            return "" if crc32 == expected.crc32 else f"has CRC-32 {crc32:08x} instead of {expected.crc32:08x}"
        except OSError as error:
            return f"cannot be read ({error.strerror})"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder.

    Raises FileNotFoundError without a manifest, and CheckpointError if the manifest is corrupt or too new.
    """
    try:
        value = read_json(folder / MANIFEST)
        version = value["format"]
        if version not in READS:
            readable = " and ".join(map(str, READS))
            raise CheckpointError(
                f"checkpoint {folder} has format {version}, but this version of flowrl reads {readable}: use the "
                f"version that wrote it, or remove the folder"
            )
        expected = value.get("crc32")
        if (expected is not None or version == FORMAT) and manifest_crc32(value) != expected:
            raise ValueError(f"its values do not match its checksum {expected}")
        return Checkpoint(folder, _manifest(value))
    except (CheckpointError, FileNotFoundError):
        raise
    except InputFileError as error:
        problem = str(error).removeprefix(f"{folder}/")
        raise CheckpointError(f"checkpoint {folder} is corrupt: {problem}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} is corrupt: {MANIFEST} cannot be read ({error})") from error


class Checkpoints:
    """Folder `checkpoints/` of a run, or another folder with checkpoints. The folder may not exist yet."""

    def __init__(self, run: Path, name: str = "checkpoints") -> None:
        self.path = run / name

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, oldest first."""
        return [step for step, path in self._folders() if (path / MANIFEST).exists()]

    def require_steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint. Raises CheckpointError if there are none."""
        run = self.path.parent
        if not run.is_dir():
            raise CheckpointError(f"{run} is not a folder: pass the output folder of a run")
        if not (steps := self.steps()):
            raise CheckpointError(f"{run} has no checkpoints: checkpoint.every=N saves one every N steps")
        return steps

    def _folders(self) -> list[tuple[int, Path]]:
        paths = self.path.iterdir() if self.path.is_dir() else []
        matches = [(re.fullmatch(r"step-(\d{6,})", path.name), path) for path in paths]
        return sorted((int(match[1]), path) for match, path in matches if match)

    def read(self, step: int) -> Checkpoint:
        """Returns the checkpoint of a step. Raises CheckpointError if its manifest is missing, corrupt or too new."""
        try:
            return read_checkpoint(self.folder(step))
        except FileNotFoundError as error:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.path.parent} has no checkpoint of step {step}; available: {steps}") from error

    def newest(self) -> Checkpoint | None:
        """Verifies and returns the newest checkpoint, or None without checkpoints.

        Raises CheckpointError if the newest checkpoint is corrupt.
        """
        steps = self.steps()
        if not steps:
            return None
        try:
            checkpoint = self.read(steps[-1])
            checkpoint.check()
        except CheckpointError as error:
            effect = f"resume from step {steps[-2]}" if len(steps) > 1 else "start over (there is no other checkpoint)"
            raise CheckpointError(f"{error}; remove the folder to {effect}") from None
        return checkpoint

    def begin(self, step: int, roles: Sequence[str]) -> Path:
        """Creates the folders of a step and its roles, and removes incomplete saves.

        Raises CheckpointError if writing fails.
        """
        folder = self.folder(step)
        try:
            self.remove_unfinished()
            if folder.exists():
                remove(folder)
            for role in roles:
                (folder / role).mkdir(parents=True)
        except OSError as error:
            raise write_error(folder, error) from error
        return folder

    def commit(self, step: int, manifest: Manifest) -> None:
        """Writes the manifest atomically after all other files are synced. Raises CheckpointError if writing fails."""
        folder = self.folder(step)
        temporary = folder / f"{MANIFEST}.tmp"
        try:
            for path in [folder / role for role in manifest.roles]:
                sync_folder(path)
            values = finite(asdict(manifest))
            write_json_with_checksum(temporary, values | {"crc32": manifest_crc32(values)})
            os.replace(temporary, folder / MANIFEST)
            for changed in (folder, self.path, self.path.parent):
                sync_folder(changed)
        except OSError as error:
            raise write_error(folder, error) from error

    def prune(self, keep_last: int | None, keep_best: int) -> None:
        """Removes old checkpoints. Keeps the `keep_last` newest, the `keep_best` best, and corrupt checkpoints."""
        scores: dict[int, Score | None] = {}
        for step in self.steps():
            try:
                scores[step] = self.read(step).manifest.score
            except CheckpointError:
                continue  # `flowrl checkpoints` lists corrupt checkpoints, and the user removes them
        for step in scores.keys() - steps_to_keep(scores, keep_last, keep_best):
            remove(self.folder(step))

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step."""
        remove(self.folder(step))

    def remove_unfinished(self) -> None:
        """Removes incomplete saves, which are folders without a manifest."""
        for _, path in self._folders():
            if not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)


def write_error(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint to {folder} ({error.strerror}): free disk space, or set output to a writable "
        f"folder; earlier checkpoints are intact"
    )


def remove(folder: Path) -> None:
    """Removes a checkpoint. Removes the manifest first, so that a crash cannot leave a corrupt checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)


def steps_to_keep(scores: Mapping[int, Score | None], keep_last: int | None, keep_best: int) -> set[int]:
    """Returns the steps of the `keep_last` newest checkpoints (None: all) and of the `keep_best` best per metric.

    There are two metrics if `evaluate_every` has changed on resume. Of two checkpoints with the same score, the newer
    is better.
    """
    steps = sorted(scores)
    kept = set(steps if keep_last is None else steps[-keep_last:])
    for name in SCORES:
        ranked = sorted((score.sort_key, step) for step, score in scores.items() if score and score.name == name)
        kept |= {step for _, step in ranked[len(ranked) - min(keep_best, len(ranked)) :]}
    return kept


def checksum_remaining_files(folder: Path, known: Mapping[str, FileChecksum]) -> dict[str, FileChecksum]:
    """Returns the checksums of all files below a folder. Reads and syncs only the files that are not in `known`."""
    checksums = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in checksums:
            checksums[name] = checksum_of(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return checksums


def new_manifest(
    step: int,
    score: Score | None,
    roles: Mapping[str, Role],
    versions: Mapping[str, str],
    files: Mapping[str, FileChecksum],
) -> Manifest:
    return Manifest(step, time.time(), score, roles, versions, files)


def manifest_crc32(values: Mapping[str, Any]) -> int:
    """Returns the CRC-32 of the values of a manifest, without its field `crc32`."""
    covered = {name: value for name, value in values.items() if name != "crc32"}
    return zlib.crc32(json.dumps(covered, sort_keys=True).encode())


def _manifest(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=value["step"],
        saved_at_s=value["saved_at_s"],
        score=None if value["score"] is None else Score(value["score"]["name"], _score_value(value["score"]["value"])),
        roles={name: Role(**role) for name, role in value["roles"].items()},
        versions=value["versions"],
        files={name: FileChecksum(*file) for name, file in value["files"].items()},
        format=value["format"],
    )


def _score_value(value: float | None) -> float:
    """Converts null to NaN, because the manifest stores NaN as null."""
    return math.nan if value is None else value
