"""Saves and loads pending rollouts, which are generated but untrained responses.

The task worker reads and writes the files, so the driver has only references.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from flowrl.checkpoints.checkpoints import write_error
from flowrl.checkpoints.table_files import ObjectError, read_table, write_table
from flowrl.config import UserError
from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch, LocalTasks, TaskRunner
from flowrl.data.batch.block import LocalRef
from flowrl.data.checksums import FileChecksum

FILE = "rows.safetensors"

IDENTITY = ("prompt_id", "sample")
"""Columns that identify a row. `read_rows` compares their values with the file."""


@dataclass(frozen=True)
class SavedRows:
    """Pending rollouts in a file of a checkpoint."""

    path: Path
    columns: tuple[str, ...]
    """Columns of the file, except prompt_id and sample (`IDENTITY`)."""

    def load(self, batch: Batch, tasks: TaskRunner | None) -> Batch:
        """Returns the columns of the file. `batch` must have the same rows in the same order. Does not block."""
        runner = tasks or LocalTasks()
        return runner.apply(read_rows, batch.select(*IDENTITY), self.columns, "same", {"path": self.path})


def save_rows(batch: Batch, path: Path) -> Future | LocalRef:
    """Writes a batch to a new file as soon as its columns are computed. Returns a future of the file's checksum. Does
    not block.
    """
    return batch.reduce(write_rows, batch.columns, path=path)


def write_rows(table: TensorDict, path: Path) -> FileChecksum:
    """Writes a table to a file and returns its checksum. Raises UserError for objects that a file cannot store."""
    try:
        return write_table(table, path)
    except ObjectError as error:
        raise UserError(
            f"{error} of the rollout, which a checkpoint cannot store: return tensors, strings, or lists, tuples and "
            f"dictionaries of strings and numbers"
        ) from None
    except OSError as error:
        raise write_error(path.parent, error) from error


def read_rows(table: TensorDict, path: Path) -> TensorDict:
    """Reads the columns of a file that `write_rows` wrote. Runs on the task worker."""
    saved = read_table(path)
    for name in IDENTITY:
        assert torch.equal(saved["rows", name], table["rows", name]), f"{path} has rows of other prompts"
        saved["rows"].del_(name)
    return saved
