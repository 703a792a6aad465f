"""Logs the worker calls and the metrics of the recipe's loop body in one step, in order."""

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.checkpoints.table_files import ObjectError, write_table
from flowrl.controller.calls.calls import Calls
from flowrl.controller.cluster import TASKS
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.checksums import FileChecksum
from flowrl.data.metric import Logged, Mean, Metric, merge_metrics

Described = Any
"""A value as JSON (`describe`). Any: JSON values are nested."""

TABLES = "calls"
"""Name of the folder with the columns that calls returned, within the folder of a recording."""


@dataclass
class LoggedCall:
    """A call of a worker group, or of a function on the task worker."""

    role: str
    method: str
    world_size: int
    arguments: Mapping[str, Described]
    """Value of each argument by name. A batch is described by its number of rows and the names of its columns. Only
    plain values and batches are logged.
    """
    result: Batch | Future
    table: Future | LocalRef | None = None
    """Future of the checksum of the file with the columns that the call returned, or of an error message
    (`save_table`). None if the call returned no columns.
    """


@dataclass
class CallLog:
    """Logs the calls that the driver's thread submits between `start` and `stop`, except during `paused`."""

    calls: Calls
    entries: list[LoggedCall] = field(default_factory=list)
    metrics: list[Logged] = field(default_factory=list)
    is_running: bool = False
    _is_paused: bool = False
    _thread: int = 0

    def start(self) -> None:
        self._thread, self.is_running = threading.get_ident(), True
        self.calls.on_submit = self._add

    def stop(self) -> None:
        self.calls.on_submit, self.is_running = None, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Logs no calls in the block. Used for calls that the run itself makes, such as those of a weight sync."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _add(self, group: WorkerGroup, method: str, arguments: Mapping[str, Any], result: Batch | Future) -> None:
        # Calls of other threads belong to the schedule, not to the loop body.
        if self._is_paused or threading.get_ident() != self._thread:
            return
        function = arguments.get("fn") if group.role == TASKS or method == "run_function" else None
        name = method if function is None else getattr(function, "__name__", type(function).__name__)
        described = {key: _describe_argument(value) for key, value in arguments.items() if key != "fn"}
        known = {key: value for key, value in described.items() if value is not None}
        self.entries.append(LoggedCall(group.role, name, group.world_size, known, result))

    def add_metrics(self, metrics: Sequence[Logged]) -> None:
        if self.is_running:
            self.metrics += metrics

    def save_tables(self, folder: Path) -> None:
        """Starts to write the result columns of the logged calls to the files `calls/0001.safetensors`, ..."""
        (folder / TABLES).mkdir(parents=True)
        for number, call in enumerate(self.entries, start=1):
            if isinstance(call.result, Batch) and call.result.columns:
                call.table = save_table(call.result, folder / TABLES / f"{number:04d}.safetensors")

    def describe_calls(self) -> tuple[list[Described], dict[str, FileChecksum]]:
        """Waits for all results. Returns each call as JSON, and the checksum of each file of `save_tables`."""
        described, files = [], {}
        for number, call in enumerate(self.entries, start=1):
            table = None if call.table is None else call.table.get()
            if isinstance(table, FileChecksum):
                files[f"{TABLES}/{number:04d}.safetensors"] = table
            described.append(
                {
                    "role": call.role,
                    "method": call.method,
                    "world_size": call.world_size,
                    "arguments": call.arguments,
                    "result": describe(call.result.get()) if isinstance(call.result, Future) else None,
                    "has_table": isinstance(table, FileChecksum),
                }
            )
        return described, files

    def merged_metrics(self) -> dict[str, float]:
        """Waits for the metrics that the recipe logged, and returns their merged values."""
        reports = [logged if isinstance(logged, Mapping) else logged.get() for logged in self.metrics]
        merged = merge_metrics([{name: _as_metric(value) for name, value in report.items()} for report in reports])
        return {name: metric.result() for name, metric in merged.items()}


def _as_metric(value: Any) -> Metric:
    return Mean(float(value), 1) if isinstance(value, int | float) else value


def _describe_argument(value: Any) -> Described:
    """Returns an argument of a call as JSON. Returns None unless it is a batch or a plain value."""
    if isinstance(value, Batch):
        return {"num_rows": value.num_rows, "columns": list(value.columns)}
    return value if isinstance(value, bool | int | float | str) else None


def describe(value: Any) -> Described:  # Any: the result of any call
    """Returns a value as JSON, such that equal JSON means bitwise equal values. Tensors and arrays become checksums.

    Exception: an object that is no plain value, array, container or dataclass becomes the name of its class.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            return describe(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) | {
                "type": f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            }
        case np.ndarray() if value.dtype != object:
            data = np.ascontiguousarray(value)
            return {"type": f"{value.dtype}{list(value.shape)}", "crc32": zlib.crc32(data.tobytes())}
        case Mapping():
            return {str(key): describe(item) for key, item in value.items()}
        case list() | tuple():
            return [describe(item) for item in value]
        case _ if is_dataclass(value):
            own = {part.name: describe(getattr(value, part.name)) for part in fields(value)}
            return {"type": type(value).__name__} | own
    return {"type": type(value).__name__}


def save_table(batch: Batch, path: Path) -> Future | LocalRef:
    """Writes a batch to a new file as soon as its values are computed. Does not block.

    Returns a future of the file's checksum, or of an error message if the batch cannot be stored. A failure does not
    end the run, because a recording is an additional output.
    """
    return batch.reduce(_record_table, batch.columns, path=path)


def _record_table(table: TensorDict, path: Path) -> FileChecksum | str:
    try:
        return write_table(table, path)
    except ObjectError as error:
        return f"its {error}, which a file cannot store"
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})"
