"""Stores the columns of a batch in one safetensors file. Columns of objects are stored as JSON in one of its tensors.

The task worker writes the files, so the driver holds only references.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tensordict import TensorDict

from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import from_tensordict, make_tensordict, num_rows
from flowrl.data.checksums import FileChecksum, write_with_checksum

_OBJECTS = "objects"
"""Name of the tensor that contains all other columns, as UTF-8 JSON."""

_TUPLE = "__tuple__"
"""Key of the JSON object that stands for a tuple."""


def save_table(batch: Batch, path: Path) -> Future | LocalRef:
    """Writes a batch to a new file as soon as its values are computed. Does not block.

    Returns a future of the file's checksum, or of an error message if the batch cannot be stored. A failure does not
    end the run, because a recording is an additional output.
    """
    return batch.reduce(write_table, batch.columns, path=path)


def write_table(table: TensorDict, path: Path) -> FileChecksum | str:
    """Writes a table to a file. Returns the checksum of the file, or an error message."""
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    for part in ("rows", "tokens"):
        for name in list(table[part].keys()):
            column = table[part].get(name)
            if isinstance(column, torch.Tensor):
                # Cloned, because safetensors rejects tensors that share memory.
                tensors[f"{part}/{name}"] = column.clone(memory_format=torch.contiguous_format)
                continue
            try:
                objects[name] = [to_json(value) for value in column.tolist()]
            except TypeError as error:
                return f"its column {name} has {error}, which a file cannot store"
    text = json.dumps({"num_rows": num_rows(table), "columns": objects})
    tensors[_OBJECTS] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    try:
        return write_with_checksum(path, save(tensors))
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})"


def read_columns(path: Path) -> dict[str, torch.Tensor | list]:
    """Returns the columns of a file that `write_table` wrote, by name. The column `length` has the number of tokens of
    each row.
    """
    rows, tokens, _ = _read(path)
    return {**rows, **tokens}


def read_table(path: Path) -> Batch:
    """Returns the batch in a file that `write_table` wrote."""
    rows, tokens, count = _read(path)
    table = make_tensordict(rows, tokens, rows.pop("length", None), count)
    return Batch.of_payload(from_tensordict(table))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    tensors = load(path.read_bytes())
    stored = json.loads(tensors.pop(_OBJECTS).numpy().tobytes())
    rows: dict[str, Any] = {name: from_json(values) for name, values in stored["columns"].items()}
    tokens: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        (rows if part == "rows" else tokens)[name] = tensor
    return rows, tokens, stored["num_rows"]


def to_json(value: Any) -> Any:  # Any: a nested value of a column
    """Returns a value for JSON. Raises TypeError, with the name of the type, if `from_json` could not restore it."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value
        case tuple() if type(value) is tuple:
            return {_TUPLE: [to_json(item) for item in value]}
        case list():
            return [to_json(item) for item in value]
        case Mapping() if all(isinstance(key, str) and key != _TUPLE for key in value):
            return {key: to_json(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """Returns the value from which `to_json` made a value for JSON."""
    if isinstance(value, Mapping):
        if set(value) == {_TUPLE}:
            return tuple(from_json(item) for item in value[_TUPLE])
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [from_json(item) for item in value]
    return value
