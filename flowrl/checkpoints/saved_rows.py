"""Rows that a checkpoint keeps: responses that no step has trained on. They go to a file and come back beside the data,
so the driver hands on references to them and reads none."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tensordict import TensorDict

from flowrl.checkpoints.checkpoints import unwritable
from flowrl.config import UserError
from flowrl.controller.future import Future
from flowrl.data.batch.batch import Batch, LocalTasks, TaskRunner
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import make_tensordict, num_rows
from flowrl.data.checksums import FileChecksum, write_with_checksum

FILE = "rows.safetensors"

IDENTITY = ("prompt_id", "sample")
"""Columns by which rows that are read are known to be those that are asked for."""

_OBJECTS = "objects"
"""Name of the tensor that holds row columns which are no tensors: JSON, in UTF-8."""


@dataclass(frozen=True)
class SavedRows:
    """Rows in a file of a checkpoint."""

    path: Path
    columns: tuple[str, ...]
    """Of the file, less those of `IDENTITY`."""

    def of(self, batch: Batch, tasks: TaskRunner | None) -> Batch:
        """The columns of all rows of the file. Does not wait.

        Args:
            batch: what tells the same rows in the same order, by the columns of `IDENTITY`.
            tasks: where the file is read; None: here.
        """
        runner = tasks or LocalTasks()
        return runner.apply(read_rows, batch.select(*IDENTITY), self.columns, "same", {"path": self.path})


def save_rows(batch: Batch, path: Path) -> Future | LocalRef:
    """Has rows written to a new file as soon as they are computed; a future of its sum. Does not wait.

    Args: `batch` has the columns of `IDENTITY` and those that `SavedRows.columns` will name.
    """
    return batch.reduce(write_rows, batch.columns, path=path)


def write_rows(table: TensorDict, path: Path) -> FileChecksum:
    """`save_rows`, beside the data.

    Raises:
        UserError: a column holds objects that JSON does not keep as they are.
        CheckpointError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, list] = {}
    for part in ("rows", "tokens"):
        for name in list(table[part].keys()):
            column = table[part].get(name)
            if isinstance(column, torch.Tensor):
                # Of their own: safetensors refuses two names for one memory.
                tensors[f"{part}/{name}"] = column.clone(memory_format=torch.contiguous_format)
            else:
                objects[name] = column.tolist()
    tensors[_OBJECTS] = torch.frombuffer(bytearray(_text(objects)), dtype=torch.uint8)
    try:
        return write_with_checksum(path, save(tensors))
    except OSError as error:
        raise unwritable(path.parent, error) from error


def _text(objects: Mapping[str, Sequence[Any]]) -> bytes:
    for name, values in objects.items():
        try:
            is_kept = json.loads(json.dumps(values)) == values
        except TypeError:
            is_kept = False
        if not is_kept:
            kinds = ", ".join(sorted({type(value).__name__ for value in values}))
            raise UserError(
                f"column {name} of the rollout holds objects ({kinds}) that a checkpoint cannot keep: have it write "
                f"tensors, text, or lists and dictionaries of text and numbers"
            )
    return json.dumps(objects).encode()


def read_rows(table: TensorDict, path: Path) -> TensorDict:
    """`SavedRows.of`, beside the data. Raises OSError."""
    tensors = load(path.read_bytes())
    rows: dict[str, Any] = json.loads(tensors.pop(_OBJECTS).numpy().tobytes())
    tokens: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        (rows if part == "rows" else tokens)[name] = tensor
    for name in IDENTITY:
        assert torch.equal(rows.pop(name), table["rows", name]), f"{path} holds rows of other prompts"
    return make_tensordict(rows, tokens, rows.pop("length", None), num_rows(table))
