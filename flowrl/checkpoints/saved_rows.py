"""Saves and loads pending rollouts, which are generated but untrained responses.

The task worker reads and writes the files, so the driver has only references.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tensordict import TensorDict

from flowrl.checkpoints.checkpoints import write_error
from flowrl.config import UserError
from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch, LocalTasks, TaskRunner
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import make_tensordict, num_rows
from flowrl.data.checksums import FileChecksum, write_with_checksum

FILE = "rows.safetensors"

IDENTITY = ("prompt_id", "sample")
"""Columns that identify a row. `read_rows` compares their values with the file."""

_OBJECTS = "objects"
"""Name of the tensor that contains all non-tensor row columns, as UTF-8 JSON."""


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
    """Writes a table to a file and returns its checksum. Raises UserError for objects that JSON cannot represent."""
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, list] = {}
    for part in ("rows", "tokens"):
        for name in list(table[part].keys()):
            column = table[part].get(name)
            if isinstance(column, torch.Tensor):
                # Cloned, because safetensors rejects tensors that share memory.
                tensors[f"{part}/{name}"] = column.clone(memory_format=torch.contiguous_format)
            else:
                objects[name] = column.tolist()
    tensors[_OBJECTS] = torch.frombuffer(bytearray(_to_json(objects)), dtype=torch.uint8)
    try:
        return write_with_checksum(path, save(tensors))
    except OSError as error:
        raise write_error(path.parent, error) from error


def _to_json(objects: Mapping[str, Sequence[Any]]) -> bytes:
    for name, values in objects.items():
        try:
            is_exact = json.loads(json.dumps(values)) == values
        except TypeError:
            is_exact = False
        if not is_exact:
            kinds = ", ".join(sorted({type(value).__name__ for value in values}))
            raise UserError(
                f"column {name} of the rollout has objects ({kinds}) that a checkpoint cannot store: return tensors, "
                f"strings, or lists and dictionaries of strings and numbers"
            )
    return json.dumps(objects).encode()


def read_rows(table: TensorDict, path: Path) -> TensorDict:
    """Reads the columns of a file that `write_rows` wrote. Runs on the task worker."""
    tensors = load(path.read_bytes())
    rows: dict[str, Any] = json.loads(tensors.pop(_OBJECTS).numpy().tobytes())
    tokens: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        (rows if part == "rows" else tokens)[name] = tensor
    for name in IDENTITY:
        assert torch.equal(rows.pop(name), table["rows", name]), f"{path} has rows of other prompts"
    return make_tensordict(rows, tokens, rows.pop("length", None), num_rows(table))
