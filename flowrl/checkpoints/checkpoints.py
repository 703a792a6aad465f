"""The checkpoints of a run on disk: which are whole, which are kept, and what is wrong with the others.

`checkpoints/step-000040/` has a folder per role, `driver.json`, perhaps `rows.safetensors`
(flowrl/checkpoints/saved_rows.py), and `manifest.json`, which is written last: a folder
without one is what a crash has left, exists for no reader, and is
removed by the next save or resume. The manifest has the size and sum of every other file. Loads neither torch nor ray.
"""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import finite
from flowrl.data.checksums import CheckpointError, FileChecksum, checksum_of, sync_folder, write_json_with_checksum

FORMAT = 2
READS = (1, FORMAT)
"""Formats that can be read. Format 1 says nothing of rows that were generated and not trained."""
MANIFEST, DRIVER = "manifest.json", "driver.json"

SCORES: Mapping[str, int] = {"accuracy": 1, "reward": 1, "loss": -1}
"""What checkpoints are compared by: 1 where more is better."""


@dataclass(frozen=True)
class Score:
    """What a checkpoint is compared by."""

    name: str
    value: float

    @classmethod
    def of(cls, values: Mapping[str, float], names: Sequence[str]) -> "Score | None":
        """The first of these scores that the metrics of a step have, if there is one."""
        name = next((name for name in names if values.get(name) is not None), None)
        return None if name is None else cls(name, values[name])

    @property
    def worth(self) -> float:
        """More is better; what is no number is worst."""
        return -math.inf if math.isnan(self.value) else SCORES[self.name] * self.value


@dataclass(frozen=True)
class Role:
    """What saved a folder of the checkpoint."""

    world_size: int
    architecture: str


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint says of itself."""

    step: int
    saved_at_s: float
    """Seconds since 1970."""
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
    """A folder that has a manifest."""

    path: Path
    manifest: Manifest

    def role(self, name: str) -> Path:
        """The folder of a role. Raises CheckpointError for one that was not saved."""
        if name not in self.manifest.roles:
            saved = ", ".join(self.manifest.roles)
            raise CheckpointError(f"checkpoint {self.path} has no role {name}; it has {saved}")
        return self.path / name

    def driver(self) -> dict[str, Any]:
        """What the driver held."""
        return json.loads((self.path / DRIVER).read_text(encoding="utf-8"))

    def check(self) -> None:
        """Reads every file. Raises CheckpointError naming one that is missing, cut off or changed."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda name: (name, self._problem(name)), self._by_size()))
        for name, problem in found:
            if problem:
                raise CheckpointError(f"checkpoint {self.path} is damaged: {name} {problem}")

    def _problem(self, name: str) -> str:
        """What is wrong with a file; empty if nothing is."""
        path, expected = self.path / name, self.manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected.size:
                return f"has {size:,} bytes and had {expected.size:,}"
            return "" if checksum_of(path) == expected else "has changed since it was written"
        except OSError as error:
            return f"cannot be read ({error.strerror})"

    def _by_size(self) -> list[str]:
        return sorted(self.manifest.files, key=lambda name: -self.manifest.files[name].size)


class Checkpoints:
    """The folder `checkpoints/` of a run. It need not exist."""

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints"

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """The steps whose folders have a manifest, oldest first."""
        return [step for step, path in self._folders() if (path / MANIFEST).exists()]

    def some_steps(self) -> list[int]:
        """As `steps`. Raises CheckpointError where there are none."""
        run = self.path.parent
        if not run.is_dir():
            raise CheckpointError(f"{run} is no folder: name the output folder of a run")
        if not (found := self.steps()):
            raise CheckpointError(f"{run} has no checkpoints; a run saves them with checkpoint.every=N")
        return found

    def _folders(self) -> list[tuple[int, Path]]:
        names = sorted(self.path.iterdir()) if self.path.is_dir() else []
        found = [(re.fullmatch(r"step-(\d{6,})", path.name), path) for path in names]
        return sorted((int(name[1]), path) for name, path in found if name)

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError: there is none, or its manifest is damaged or too new."""
        folder = self.folder(step)
        try:
            value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            number = value["format"]
            if number not in READS:
                reads = " and ".join(map(str, READS))
                raise CheckpointError(
                    f"checkpoint {folder} has format {number}, and this version reads {reads}: use the version of "
                    f"flowrl that wrote it, or remove the folder"
                )
            return Checkpoint(folder, _manifest(value))
        except FileNotFoundError as error:
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.path.parent} has no checkpoint of step {step}; it has {have}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read ({error})") from error

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, every file of it read and found whole; None without any.

        Raises:
            CheckpointError: it is damaged. An older one is not taken silently: the sentence says how to.
        """
        steps = self.steps()
        if not steps:
            return None
        try:
            checkpoint = self.read(steps[-1])
            checkpoint.check()
        except CheckpointError as error:
            others = f"go on from step {steps[-2]}" if len(steps) > 1 else "begin again: it is the only one"
            raise CheckpointError(f"{error}; remove the folder to {others}") from None
        return checkpoint

    def begin(self, step: int, roles: Sequence[str]) -> Path:
        """Makes the folder of a step with one per role, and removes what crashes have left. Raises CheckpointError."""
        folder = self.folder(step)
        try:
            self.remove_unfinished()
            if folder.exists():
                remove(folder)
            for role in roles:
                (folder / role).mkdir(parents=True)
        except OSError as error:
            raise unwritable(folder, error) from error
        return folder

    def commit(self, step: int, manifest: Manifest) -> None:
        """Makes a checkpoint of a folder whose files are all on the disk: from now on it exists.

        A crash leaves a folder with the whole manifest or without any. Raises CheckpointError.
        """
        folder = self.folder(step)
        temporary = folder / f"{MANIFEST}.tmp"
        try:
            for path in [folder / role for role in manifest.roles]:
                sync_folder(path)
            write_json_with_checksum(temporary, finite(asdict(manifest)))
            os.replace(temporary, folder / MANIFEST)
            for changed in (folder, self.path, self.path.parent):
                sync_folder(changed)
        except OSError as error:
            raise unwritable(folder, error) from error

    def prune(self, keep_last: int | None, keep_best: int) -> None:
        """Removes the checkpoints that are neither among the newest nor among the best; damaged ones stay."""
        scores: dict[int, Score | None] = {}
        for step in self.steps():
            try:
                scores[step] = self.read(step).manifest.score
            except CheckpointError:
                continue  # for `flowrl checkpoints` to tell, and its owner to remove
        for step in scores.keys() - kept(scores, keep_last, keep_best):
            remove(self.folder(step))

    def remove_unfinished(self) -> None:
        """Removes the folders without a manifest."""
        for _, path in self._folders():
            if not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """The error for a folder that cannot be written."""
    return CheckpointError(
        f"the checkpoint cannot be written to {folder} ({error.strerror}); make room or set output to a folder that "
        f"can be written; the checkpoints before it are untouched"
    )


def remove(folder: Path) -> None:
    """Removes a checkpoint, its manifest first: at no moment is there one that is half removed and looks whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)


def kept(scores: Mapping[int, Score | None], keep_last: int | None, keep_best: int) -> set[int]:
    """Which of the steps stay: the newest, and the best.

    Args:
        scores: step -> its score. Those of one name are compared; a run that goes on with another `evaluate_every` has
            two, and keeps the best of each.
        keep_last: how many of the newest; None is all.
        keep_best: how many of the best. Of equals the newer ones stay.
    """
    steps = sorted(scores)
    stay = set(steps if keep_last is None else steps[-keep_last:])
    for name in SCORES:
        ranked = sorted((score.worth, step) for step, score in scores.items() if score and score.name == name)
        stay |= {step for _, step in ranked[len(ranked) - min(keep_best, len(ranked)) :]}
    return stay


def sums_of_rest(folder: Path, known: Mapping[str, FileChecksum]) -> dict[str, FileChecksum]:
    """The sums of all files below a folder, of those read that nobody has summed. Brings those to the disk too."""
    found = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in found:
            found[name] = checksum_of(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return found


def new_manifest(
    step: int,
    score: Score | None,
    roles: Mapping[str, Role],
    versions: Mapping[str, str],
    files: Mapping[str, FileChecksum],
) -> Manifest:
    """The manifest of a checkpoint that is saved now."""
    return Manifest(step, time.time(), score, roles, versions, files)


def _manifest(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=value["step"],
        saved_at_s=value["saved_at_s"],
        score=None if value["score"] is None else Score(value["score"]["name"], _number(value["score"]["value"])),
        roles={name: Role(**role) for name, role in value["roles"].items()},
        versions=value["versions"],
        files={name: FileChecksum(*file) for name, file in value["files"].items()},
        format=value["format"],
    )


def _number(value: float | None) -> float:
    """JSON has null for what is not finite."""
    return math.nan if value is None else value
