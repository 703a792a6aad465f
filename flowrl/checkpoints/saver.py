"""Saves and restores checkpoints from the driver: worker groups, driver objects and pending rollouts."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from flowrl.checkpoints.checkpoints import (
    DRIVER,
    Checkpoint,
    Checkpoints,
    Role,
    Score,
    checksum_remaining_files,
    new_manifest,
    write_error,
)
from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import CheckpointConfig, UserError
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import get_registered_methods
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.checksums import FileChecksum, Saved, write_json_with_checksum, write_with_checksum
from flowrl.data.metric import finite
from flowrl.engines.train.random_state import random_state, restore_random_state

_DOCS = "see docs/training.md, Checkpoints and resume"
_PROMPTS = "prompts"


class Checkpointable(Protocol):
    """A driver object whose state is saved in checkpoints."""

    def state(self) -> Mapping[str, Any]:
        """Returns the state as plain values."""
        ...

    def restore(self, state: Any) -> None: ...


class Buffer(Protocol):
    """Source of a run's batches, which may have pending rollouts (generated but untrained responses)."""

    def snapshot(self) -> tuple[Mapping[str, Any], Batch | None]:
        """Returns the state as plain values, and the pending rollouts (`prompt_id`, `sample` and the rollout's columns)
        of this state, or None.
        """
        ...

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None: ...


@dataclass
class _Saving:
    step: int
    folder: Path
    files: dict[str, FileChecksum]
    saves: Mapping[str, Future]
    """Future of `save_checkpoint` per role."""
    tables: dict[str, Future | LocalRef]
    """Future of the checksum per file that the task worker writes, such as the file with the pending rollouts."""
    polls: dict[str, Future] = field(default_factory=dict)
    """Future of `checkpoint_saved` per role, while in flight."""
    saved: dict[str, Sequence[Saved]] = field(default_factory=dict)
    """Role -> result of `checkpoint_saved` (the written files) per rank, for the roles whose files are complete."""


class Saver:
    """Saves worker groups and driver objects, one checkpoint at a time."""

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig, compared_by: Sequence[str]) -> None:
        """`compared_by` lists the metrics that rank checkpoints, in order of preference."""
        self.groups: dict[str, WorkerGroup] = {}
        self.objects: dict[str, Checkpointable] = {}
        self.last_step = 0
        """Step of the checkpoint that was saved or restored last."""
        self._checkpoints, self._config, self._compared_by = checkpoints, config, compared_by
        self._buffer: Buffer | None = None
        self._saving: _Saving | None = None

    def add(self, groups: Sequence[WorkerGroup], objects: Mapping[str, Checkpointable]) -> None:
        """Adds groups and objects to checkpoints. Raises UserError if a group's workers do not support checkpoints."""
        for group in groups:
            missing = {"save_checkpoint", "load_checkpoint"} - get_registered_methods(group.cls).keys()
            if missing:
                raise UserError(
                    f"role {group.role} cannot be saved in checkpoints: {group.cls.__name__} has no registered method "
                    f"{' and '.join(sorted(missing))}; {_DOCS}"
                )
            self.groups[group.role] = group
        self.objects |= objects

    def add_buffer(self, buffer: Buffer) -> None:
        """Adds the source of batches, with its pending rollouts, to checkpoints."""
        self._buffer = buffer

    def check(self, resumed: Checkpoint | None) -> None:
        """Raises UserError if checkpoints are enabled but the recipe adds no group."""
        if self._config.every or resumed is not None:
            self.check_groups("checkpoints are enabled")

    def check_groups(self, reason: str) -> None:
        """Raises UserError, with the reason for which groups are saved, if the recipe adds no group."""
        if not self.groups:
            raise UserError(
                f"{reason}, but the recipe adds nothing to checkpoints: call "
                f"run.add_checkpointable(actor, ...); {_DOCS}"
            )

    @property
    def pending_step(self) -> int | None:
        """Step of the checkpoint that is being written, or None."""
        return None if self._saving is None else self._saving.step

    # Saving.

    def begin(
        self, step: int, driver: Mapping[str, Any], files: Mapping[str, bytes] | None = None, *, asynchronous: bool
    ) -> Path:
        """Starts a checkpoint, which will contain the effects of all calls submitted so far. Does not wait for workers.

        `driver` is the state of the run. `files` maps names of additional files to their contents. Returns the folder.

        Raises CheckpointError if the driver's state cannot be written. `advance` raises the errors of the workers.
        """
        assert self._saving is None, "the previous checkpoint is not finished"
        folder = self._checkpoints.begin(step, list(self.groups)).absolute()
        self.last_step = step
        objects = {name: added.state() for name, added in self.objects.items()}
        rows = None
        if self._buffer is not None:
            objects[_PROMPTS], rows = self._buffer.snapshot()
        columns = None if rows is None else [name for name in rows.columns if name not in IDENTITY]
        state = finite({**driver, "objects": objects, "rows": columns, "random": random_state()})
        try:
            written_files = {DRIVER: write_json_with_checksum(folder / DRIVER, state)}
            for name, content in (files or {}).items():
                written_files[name] = write_with_checksum(folder / name, content)
        except OSError as error:
            raise write_error(folder, error) from error
        saves = {
            role: group.save_checkpoint.submit(folder=folder / role, asynchronous=asynchronous)
            for role, group in self.groups.items()
        }
        tables = {} if rows is None else {FILE: save_rows(rows, folder / FILE)}
        self._saving = _Saving(step, folder, written_files, saves, tables)
        return folder

    def wait_for_groups(self) -> None:
        """Blocks until the groups have written their files of the pending checkpoint. Raises WorkerError."""
        assert self._saving is not None, "no checkpoint was begun"
        for role in self.groups:
            self._poll(self._saving, role, wait=True)

    def discard(self) -> None:
        """Removes the pending checkpoint, whose groups have written their files."""
        self._saving = None
        self._checkpoints.remove_unfinished()

    def add_files(self, files: Mapping[str, FileChecksum]) -> None:
        """Adds files, which exist in the folder of the pending checkpoint, to its manifest."""
        assert self._saving is not None, "no checkpoint was begun"
        self._saving.files |= files

    def advance(
        self,
        lines: Sequence[Mapping[str, float]],
        *,
        wait: bool = False,
        before_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Commits the pending checkpoint if all files are written and the metrics of its step are known.

        With `wait`, blocks until then. `lines` are the log records so far. `before_commit` receives the step of the
        checkpoint. Raises WorkerError if a group failed, and CheckpointError if the manifest is not writable.
        """
        saving = self._saving
        if saving is None:
            return
        for role in self.groups:
            self._poll(saving, role, wait)
        recent = takewhile(lambda line: line["step"] >= saving.step, reversed(lines))
        line = next((line for line in recent if line["step"] == saving.step), None)
        has_tables = wait or all(table.done() for table in saving.tables.values())
        if line is not None and has_tables and saving.saved.keys() == self.groups.keys():
            before_commit(saving.step)
            self._commit(saving, Score.of(line, self._compared_by))

    def _poll(self, saving: _Saving, role: str, wait: bool) -> None:
        """Asks the ranks of a group whether they have finished, or reads their answer. Stores the files when all have.

        If a rank has not finished, the next call asks again; with `wait`, this call does.
        """
        save, group = saving.saves[role], self.groups[role]
        if role in saving.saved or not (wait or save.done()):
            return
        if "checkpoint_saved" not in get_registered_methods(group.cls):
            save.get()
            saving.saved[role] = [Saved()] * group.world_size
            return
        if role not in saving.polls:
            saving.polls[role] = group.checkpoint_saved.submit(wait=wait)
        if wait or saving.polls[role].done():
            reports = saving.polls.pop(role).get()
            if None not in reports:
                saving.saved[role] = reports
            elif wait:
                self._poll(saving, role, wait)

    def _commit(self, saving: _Saving, score: Score | None) -> None:
        roles = {}
        saving.files |= {name: table.get() for name, table in saving.tables.items()}
        try:
            for role, reports in saving.saved.items():
                known = {name: file for saved in reports for name, file in saved.files.items()}
                checksums = checksum_remaining_files(saving.folder / role, known)
                saving.files |= {f"{role}/{name}": file for name, file in checksums.items()}
                roles[role] = Role(len(reports), reports[0].architecture)
        except OSError as error:
            raise write_error(saving.folder, error) from error
        self._checkpoints.commit(saving.step, new_manifest(saving.step, score, roles, package_versions(), saving.files))
        self._saving = None
        self._checkpoints.prune(self._config.keep_last, self._config.keep_best)

    # Restoring.

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores groups and objects, and blocks.

        Raises CheckpointError or UserError if the checkpoint lacks one of them.
        """
        self.last_step = checkpoint.manifest.step
        state = checkpoint.driver()
        loads = [
            group.load_checkpoint.submit(folder=checkpoint.role(role).absolute()) for role, group in self.groups.items()
        ]
        for name, added in self.objects.items():
            if name not in state["objects"]:
                raise UserError(
                    f"checkpoint {checkpoint.path} has no {name}, which the recipe adds with "
                    f"run.add_checkpointable; {_DOCS}"
                )
            added.restore(state["objects"][name])
        if self._buffer is not None:
            columns = state["rows"]
            rows = None if columns is None else SavedRows(checkpoint.path.absolute() / FILE, tuple(columns))
            self._buffer.restore(state["objects"][_PROMPTS], rows)
        for load in loads:
            load.get()
        restore_random_state(state["random"])


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, flowrl and the packages that compute its results."""
    versions = {"python": platform.python_version()}
    for package in ("flowrl", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # the program runs from source and is not installed
            versions[package] = "not installed"
    return versions
