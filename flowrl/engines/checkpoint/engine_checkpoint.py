"""Saves and restores an engine: weights, optimizer, counters and random number generators.

Tensors are stored under parameter names. torch's distributed checkpoint plans the reads and writes. Rank 0 writes
replicated tensors, and each rank writes its shards. Any number of ranks can load a checkpoint, with any strategy.

All collectives run in `save` and `result`, on the caller's thread and in the role's process group. A background thread
only writes files. torch's `async_save` is not used, because it runs collectives on a second thread during training.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from flowrl.config.source import read_json
from flowrl.data.checksums import (
    CheckpointError,
    ChecksummedFile,
    FileChecksum,
    Saved,
    sync_folder,
    write_json_with_checksum,
    write_with_checksum,
)
from flowrl.data.dtypes import dtype_name
from flowrl.devices.device import get_device
from flowrl.engines.checkpoint.shards import (
    ALIGNMENT,
    INDEX,
    Index,
    ShardLocation,
    format_index,
    read_index,
    read_into,
    tensor_bytes,
)
from flowrl.engines.train.base import SavedEngine
from flowrl.engines.train.module_engine import OPTIMIZER
from flowrl.engines.train.random_state import random_state, restore_random_state


@dataclass
class _Save:
    """One save on one rank, from the snapshot until all ranks have written their files."""

    folder: Path
    rank: int
    names: Sequence[tuple[str, tuple[int, ...]]]
    tensors: Sequence[Tensor]
    metadata: Metadata
    engine_state: Mapping[str, float]
    random_state: Mapping[str, Any]
    extra_files: Mapping[str, bytes]
    locations: dict[tuple[str, tuple[int, ...]], ShardLocation] = field(default_factory=dict)
    checksums: dict[str, FileChecksum] = field(default_factory=dict)
    error: str | None = None
    thread: threading.Thread | None = None

    def write(self) -> None:
        """Writes the files of this rank. Stores the message of an OSError in `error` instead of raising it."""
        try:
            self._write()
        except OSError as error:
            self.error = write_error_message(self.folder, error)

    def _write(self) -> None:
        if self.tensors:
            name = f"rank-{self.rank:05d}.bin"
            file = ChecksummedFile(self.folder / name)
            try:
                for key, tensor in zip(self.names, self.tensors, strict=True):
                    self.locations[key] = ShardLocation(name, file.align(ALIGNMENT))
                    file.write(tensor_bytes(tensor))
                self.checksums[name] = file.finish()
            finally:
                file.close()
        name = random_state_file(self.rank)
        self.checksums[name] = write_json_with_checksum(self.folder / name, self.random_state)
        for name, data in self.extra_files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            self.checksums[name] = write_with_checksum(self.folder / name, data)
        for folder in {self.folder, *((self.folder / name).parent for name in self.extra_files)}:
            sync_folder(folder)


class EngineCheckpoints:
    """Saves an engine. Only one save runs at a time. All ranks of the engine must call each method together."""

    def __init__(self, engine: SavedEngine) -> None:
        self._engine = engine
        self._pending_save: _Save | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Host memory of the last asynchronous save, which the next save reuses."""
        self._copies: list[Tensor] = []
        """Copies of the saved tensors, as views of `_buffer`."""

    def save(self, folder: Path, *, asynchronous: bool = False, extra_files: Mapping[str, bytes] | None = None) -> None:
        """Starts a save. `result` completes the save.

        Args:
            folder: an existing empty folder, visible to all ranks.
            asynchronous: copies the state to host memory and writes the files in a background thread. False writes the
                files before `save` returns.
            extra_files: additional files that rank 0 writes, as path below the folder -> contents.
        Raises CheckpointError if the optimizer has state that is not a tensor.
        """
        assert self._pending_save is None, "the previous save is unfinished: call result() first"
        engine, rank = self._engine, _rank(self._engine.group)
        state = engine.save_state(with_optimizer=engine.has_optimizer_state)
        planner, plan, metadata = _plan_save(state, engine.group)
        resolved = [planner.resolve_data(item) for item in plan.items]
        tensors = [tensor for tensor in resolved if isinstance(tensor, Tensor)]
        if len(tensors) < len(resolved):
            items = zip(plan.items, resolved, strict=True)
            name = next(item.index.fqn for item, value in items if not isinstance(value, Tensor))
            raise CheckpointError(
                f"{name} is not a tensor, so it cannot be saved: use an optimizer whose state consists of tensors"
            )
        self._pending_save = save = _Save(
            folder,
            rank,
            [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items],
            self._copy_to_host(tensors) if asynchronous else tensors,
            metadata,
            engine.counters(),
            random_state(),
            extra_files if extra_files and rank == 0 else {},
        )
        if asynchronous:
            # A daemon thread, so that a failing process does not wait for an incomplete checkpoint.
            save.thread = threading.Thread(target=save.write, name="checkpoint", daemon=True)
            save.thread.start()
        else:
            save.write()

    def result(self, *, wait: bool = True) -> Saved | None:
        """Completes the save once all ranks have written their files.

        Args:
            wait: True blocks until all ranks have written. False returns None if a rank is still writing.
        Returns: checksums of the files that this rank wrote, and the engine's architecture.
        Raises CheckpointError on all ranks if any rank could not write its files.
        """
        save = self._pending_save
        assert save is not None, "no save was started"
        if wait and save.thread is not None:
            save.thread.join()
        is_writing = save.thread is not None and save.thread.is_alive()
        outcomes = _all_gather((is_writing, save.error, {} if is_writing else save.locations), self._engine.group)
        if any(is_writing for is_writing, _, _ in outcomes):
            return None
        self._pending_save = None
        for _, error, _ in outcomes:
            if error is not None:
                raise CheckpointError(error)
        if save.rank == 0:
            locations = {key: location for _, _, written in outcomes for key, location in written.items()}
            text = format_index(save.metadata, locations, save.engine_state)
            try:
                save.checksums[INDEX] = write_with_checksum(save.folder / INDEX, text.encode())
                sync_folder(save.folder)
            except OSError as error:
                raise CheckpointError(write_error_message(save.folder, error)) from error
        return Saved(save.checksums, self._engine.architecture)

    def _copy_to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors to host memory. All saves use one buffer, because copies to new memory are several times
        slower.
        """
        layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        devices = sorted({tensor.device for tensor in tensors}, key=str)
        if layouts != [(copied.shape, copied.dtype) for copied in self._copies]:
            sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
            # Allocated for a GPU if any tensor is on a GPU, because "cuda" is sorted after "cpu".
            self._buffer = get_device(devices[-1] if devices else "cpu").host_buffer(sum(sizes))
            parts = zip(self._buffer.split(sizes), tensors, strict=True)
            self._copies = [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in parts]
        for copied, tensor in zip(self._copies, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # torch would synchronize its threads for each tensor, and copy 40 times slower if a core is busy.
                np.copyto(np.asarray(tensor_bytes(copied)), np.asarray(tensor_bytes(tensor)))
            else:
                copied.copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            get_device(device).synchronize()
        return self._copies


def load(engine: SavedEngine, folder: Path) -> None:
    """Restores an engine from a folder that any number of ranks wrote. All ranks of the engine must call this together.

    Raises CheckpointError if the folder has no checkpoint, or a checkpoint of a different model. In these cases, the
    engine is unchanged. Also raises CheckpointError if a file is missing or too short.
    """
    index = read_index(folder)
    has_optimizer = any(name.startswith(OPTIMIZER) for name in index.tensors)
    state = engine.save_state(with_optimizer=has_optimizer)
    _check_architecture(state, index, folder, engine.group)
    read_into(state, folder, index, engine.group)
    engine.load_state(state, index.engine_state)
    file = folder / random_state_file(_rank(engine.group))
    if file.is_file():
        restore_random_state(read_json(file))


def write_error_message(folder: Path, error: OSError) -> str:
    return (
        f"the checkpoint cannot be written to {folder} ({error.strerror}): free disk space or set output to another "
        f"disk; earlier checkpoints are complete, and resume=auto continues from the newest"
    )


def random_state_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _plan_save(state: dict[str, Any], group: ProcessGroup | None) -> tuple[DefaultSavePlanner, SavePlan, Metadata]:
    """Returns torch's save planner, the plan of this rank, and the metadata of all ranks."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, is_coordinator=_rank(group) == 0)
    # Every rank computes the same global plan from all local plans, which saves a broadcast.
    plans, metadata = planner.create_global_plan(_all_gather(planner.create_local_plan(), group))
    return planner, planner.finish_plan(plans[_rank(group)]), metadata


def _check_architecture(state: Mapping[str, Any], index: Index, folder: Path, group: ProcessGroup | None) -> None:
    """Raises CheckpointError on every rank if the tensors of all ranks and of the checkpoint differ in a name, shape or
    dtype.
    """
    own = {name: (list(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in state.items()}
    known = {name: layout for part in _all_gather(own, group) for name, layout in part.items()}
    for name, (size, dtype) in known.items():
        stored = index.tensors.get(name)
        if stored is not None and (stored["size"], stored["dtype"]) != (size, dtype):
            difference = f"{name} is {stored['dtype']} {stored['size']} in the checkpoint and {dtype} {size} in the run"
            raise CheckpointError(_mismatch_message(folder, name, difference))
    for name in [*known, *index.tensors]:
        if name not in index.tensors or name not in known:
            where = "checkpoint" if name in index.tensors else "run"
            raise CheckpointError(_mismatch_message(folder, name, f"only the {where} has {name}"))


def _mismatch_message(folder: Path, name: str, difference: str) -> str:
    if name.startswith(OPTIMIZER):
        what = "different optimizer"
        fix = "resume with the optimizer.kind that the run started with, and for adamw_8bit also with its tp"
    else:
        what, fix = "different model", "resume with the model that the run started with"
    return f"the checkpoint in {folder} is of a {what}: {difference}; {fix}"


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else distributed.get_rank(group)


def _all_gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values
