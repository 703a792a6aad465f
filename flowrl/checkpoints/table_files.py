"""Stores the columns of a batch in one safetensors file. Columns of objects are JSON in one of its tensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tensordict import TensorDict

from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import from_tensordict, make_tensordict, num_rows
from flowrl.data.checksums import FileChecksum, write_with_checksum

_OBJECTS, _NUM_ROWS = "objects", "num_rows"
"""Names of the tensors with all other columns, as UTF-8 JSON, and with the number of rows."""

_TUPLE = "__tuple__"
"""Key of the JSON object that stands for a tuple."""


class ObjectError(TypeError):
    """An object that a file cannot store. The text has the name of its class, and of its column if it is known."""


def write_table(table: TensorDict, path: Path) -> FileChecksum:
    """Writes a table to a new file, and returns the checksum of the file. Raises ObjectError and OSError."""
    tensors: dict[str, torch.Tensor] = {_NUM_ROWS: torch.tensor(num_rows(table))}
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
            except ObjectError as error:
                raise ObjectError(f"column {name} has {error}") from None
    tensors[_OBJECTS] = torch.frombuffer(bytearray(json.dumps(objects).encode()), dtype=torch.uint8)
    return write_with_checksum(path, save(tensors))


def read_columns(path: Path) -> dict[str, torch.Tensor | list]:
    """Returns the columns of a file that `write_table` wrote, by name. The column `length` has the number of tokens of
    each row.
    """
    rows, tokens, _ = _read(path)
    return {**rows, **tokens}


def read_table(path: Path) -> TensorDict:
    """Returns the table in a file that `write_table` wrote."""
    rows, tokens, count = _read(path)
    return make_tensordict(rows, tokens, rows.pop("length", None), count)


def read_batch(path: Path) -> Batch:
    """Returns the batch in a file that `write_table` wrote."""
    return Batch.of_payload(from_tensordict(read_table(path)))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], int | None]:
    tensors = load(path.read_bytes())
    objects = json.loads(tensors.pop(_OBJECTS).numpy().tobytes())
    # Earlier versions wrote no number of rows, and only tables with columns of rows.
    count = int(tensors.pop(_NUM_ROWS)) if _NUM_ROWS in tensors else None
    rows: dict[str, Any] = {name: from_json(values) for name, values in objects.items()}
    tokens: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        (rows if part == "rows" else tokens)[name] = tensor
    return rows, tokens, count


def to_json(value: Any) -> Any:  # Any: a nested value of a column
    """Returns a value for JSON. Raises ObjectError, with the class, if `from_json` could not restore it."""
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
    raise ObjectError(f"a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """Returns the value from which `to_json` made a value for JSON."""
    if isinstance(value, Mapping):
        if set(value) == {_TUPLE}:
            return tuple(from_json(item) for item in value[_TUPLE])
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [from_json(item) for item in value]
    return value
