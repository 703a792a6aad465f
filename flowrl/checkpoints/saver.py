"""The driver's part of a checkpoint: has groups save and load, and makes the whole of it exist."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from flowrl.checkpoints.checkpoints import (
    DRIVER,
    Checkpoint,
    Checkpoints,
    Role,
    Score,
    new_manifest,
    sums_of_rest,
    unwritable,
)
from flowrl.checkpoints.run_folder import finite
from flowrl.checkpoints.saved_rows import FILE, IDENTITY, SavedRows, save_rows
from flowrl.config import CheckpointConfig, UserError
from flowrl.controller.future import Future
from flowrl.controller.group import WorkerGroup
from flowrl.controller.register import registered_methods
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.checksums import FileChecksum, Saved, write_json_with_checksum
from flowrl.engines.train.random_state import random_state, restore_random_state

_DOCS = "see docs/training.md, Checkpoints and resume"
_PROMPTS = "prompts"
"""What the buffer's state is called among those of the driver's objects."""


class Checkpointable(Protocol):
    """What the driver holds between steps, and a checkpoint keeps."""

    def state(self) -> Mapping[str, Any]:
        """Where it stands, as plain values."""
        ...

    def restore(self, state: Any) -> None:
        """Goes on where `state` was taken."""
        ...


class Buffer(Protocol):
    """What gives a run its batches. It may hold rows that were generated and that no step has trained on."""

    def state(self) -> Mapping[str, Any]:
        """Where it stands, as plain values."""
        ...

    def rows(self) -> Batch | None:
        """Those rows: their columns `prompt_id` and `sample`, and what the rollout wrote; None without any."""
        ...

    def restore(self, state: Mapping[str, Any], rows: SavedRows | None) -> None:
        """Goes on where `state` was taken, with the rows that `rows` gave."""
        ...


@dataclass
class _Saving:
    """A checkpoint from the moment at which its state was taken until it exists."""

    step: int
    folder: Path
    files: dict[str, FileChecksum]
    saves: Mapping[str, Future]
    """Role -> its call of `save_checkpoint`."""
    rows: Future | LocalRef | None
    """The sum of the file of rows, where there is one."""
    asked: dict[str, Future] = field(default_factory=dict)
    """Role -> a call of `checkpoint_saved` that was not read yet."""
    saved: dict[str, Sequence[Saved]] = field(default_factory=dict)


class Saver:
    """Saves groups and objects of a driver, one checkpoint at a time."""

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig, compared_by: Sequence[str]) -> None:
        """Args: `compared_by` are the metrics that tell which checkpoints are best, the first that a step has."""
        self.groups: dict[str, WorkerGroup] = {}
        self.objects: dict[str, Checkpointable] = {}
        self.last_step = 0
        """The step of the checkpoint that was begun last, or gone on from."""
        self._checkpoints, self._config, self._compared_by = checkpoints, config, compared_by
        self._buffer: Buffer | None = None
        self._saving: _Saving | None = None

    def keep(self, groups: Sequence[WorkerGroup], objects: Mapping[str, Checkpointable]) -> None:
        """Says what checkpoints hold. Raises UserError for a group that cannot be saved."""
        for group in groups:
            lacks = {"save_checkpoint", "load_checkpoint"} - registered_methods(group.cls).keys()
            if lacks:
                raise UserError(
                    f"role {group.role} cannot be kept: {group.cls.__name__} has no registered method "
                    f"{' and '.join(sorted(lacks))}; {_DOCS}"
                )
            self.groups[group.role] = group
        self.objects |= objects

    def keep_pending_rollouts(self, buffer: Buffer) -> None:
        """Says what gives the run its batches."""
        self._buffer = buffer

    def check(self, resumed: Checkpoint | None) -> None:
        """Refuses a recipe that asks for checkpoints and keeps nothing. Raises UserError."""
        if not self.groups and (self._config.every or resumed is not None):
            raise UserError(f"checkpoints are on, but the recipe keeps nothing: call run.keep(actor, ...); {_DOCS}")

    def is_due(self, step: int) -> bool:
        return bool(self._config.every) and step % self._config.every == 0

    @property
    def waits_for(self) -> int | None:
        """The step whose checkpoint is being written; None without one."""
        return None if self._saving is None else self._saving.step

    # Saving.

    def begin(self, step: int, driver: Mapping[str, Any], *, asynchronous: bool) -> None:
        """Has the groups take their state as it is after all calls so far. Does not wait.

        Rows that are generated at this moment are written when they are there.

        Raises: CheckpointError where the folder cannot be written.
        """
        assert self._saving is None, "the checkpoint before this one is not finished"
        folder = self._checkpoints.begin(step, list(self.groups)).absolute()
        self.last_step = step
        objects = {name: kept.state() for name, kept in self.objects.items()}
        rows = None if self._buffer is None else self._buffer.rows()
        if self._buffer is not None:
            objects[_PROMPTS] = self._buffer.state()
        columns = None if rows is None else [name for name in rows.columns if name not in IDENTITY]
        state = finite({**driver, "objects": objects, "rows": columns, "random": random_state()})
        try:
            files = {DRIVER: write_json_with_checksum(folder / DRIVER, state)}
        except OSError as error:
            raise unwritable(folder, error) from error
        saves = {
            role: group.save_checkpoint.submit(folder=folder / role, asynchronous=asynchronous)
            for role, group in self.groups.items()
        }
        written = None if rows is None else save_rows(rows, folder / FILE)
        self._saving = _Saving(step, folder, files, saves, written)

    def advance(self, lines: Sequence[Mapping[str, float]], *, wait: bool = False) -> None:
        """Makes the checkpoint exist as soon as every rank has written and the step's line is there.

        Args:
            lines: of the metrics so far; with `wait` the step's is among them.
            wait: until it exists.
        Raises:
            WorkerError: a group could not save, or the rows could not be computed or written.
            CheckpointError: the manifest cannot be written.
        """
        saving = self._saving
        if saving is None:
            return
        for role in self.groups:
            self._ask(saving, role, wait)
        line = next((line for line in reversed(lines) if line["step"] == saving.step), None)
        has_rows = wait or saving.rows is None or saving.rows.done()
        if line is not None and has_rows and saving.saved.keys() == self.groups.keys():
            self._commit(saving, Score.of(line, self._compared_by))

    def _ask(self, saving: _Saving, role: str, wait: bool) -> None:
        """Reads what a group has answered, and asks again."""
        save, group = saving.saves[role], self.groups[role]
        if role in saving.saved or not (wait or save.done()):
            return
        if "checkpoint_saved" not in registered_methods(group.cls):
            save.get()
            saving.saved[role] = [Saved()] * group.world_size
            return
        if role not in saving.asked:
            saving.asked[role] = group.checkpoint_saved.submit(wait=wait)
        if wait or saving.asked[role].done():
            answers = saving.asked.pop(role).get()
            if None not in answers:
                saving.saved[role] = answers
            elif wait:
                self._ask(saving, role, wait)

    def _commit(self, saving: _Saving, score: Score | None) -> None:
        roles = {}
        if saving.rows is not None:
            saving.files[FILE] = saving.rows.get()
        try:
            for role, answers in saving.saved.items():
                known = {name: file for saved in answers for name, file in saved.files.items()}
                sums = sums_of_rest(saving.folder / role, known)
                saving.files |= {f"{role}/{name}": file for name, file in sums.items()}
                roles[role] = Role(len(answers), answers[0].architecture)
        except OSError as error:
            raise unwritable(saving.folder, error) from error
        self._checkpoints.commit(saving.step, new_manifest(saving.step, score, roles, _versions(), saving.files))
        self._saving = None
        self._checkpoints.prune(self._config.keep_last, self._config.keep_best)

    # Going on.

    def restore(self, checkpoint: Checkpoint) -> None:
        """Brings groups and objects to a checkpoint. Waits for them.

        Raises: CheckpointError where it lacks one of them. WorkerError: a group cannot load it.
        """
        self.last_step = checkpoint.manifest.step
        state = checkpoint.driver()
        loads = [
            group.load_checkpoint.submit(folder=checkpoint.role(role).absolute()) for role, group in self.groups.items()
        ]
        for name, kept in self.objects.items():
            if name not in state["objects"]:
                raise UserError(f"checkpoint {checkpoint.path} has no {name}, which the recipe keeps: {_DOCS}")
            kept.restore(state["objects"][name])
        if self._buffer is not None:
            columns = state["rows"]
            rows = None if columns is None else SavedRows(checkpoint.path.absolute() / FILE, tuple(columns))
            self._buffer.restore(state["objects"][_PROMPTS], rows)
        for load in loads:
            load.get()
        restore_random_state(state["random"])


def _versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    found = {"python": platform.python_version()}
    for package in ("flowrl", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a folder that is not installed
            found[package] = "not installed"
    return found
