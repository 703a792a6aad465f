"""An engine to a folder and back: weights, optimizer, position in its schedules, and random number generators.

Tensors are named by the model's parameters, never by rank, and torch's distributed checkpoint plans who writes and who
reads which piece: of what every rank has a copy, rank 0 writes all; of what is sharded, each rank its shards. So a
folder is loaded by any number of ranks, under any strategy.

All that ranks agree on is agreed in `save` and `saved` themselves, on the caller's thread and in the role's own group.
Only the writing goes on beside it: torch's `async_save` would meet its peers on a thread of its own, in the middle of
whatever collectives training is in, and needs a second group for that.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from flowrl.data.checksums import (
    CheckpointError,
    ChecksummedFile,
    FileChecksum,
    Saved,
    sync_folder,
    write_json_with_checksum,
    write_with_checksum,
)
from flowrl.engines.checkpoint.shards import (
    ALIGNMENT,
    INDEX,
    Index,
    Place,
    bytes_of,
    index_text,
    read_index,
    read_into,
)
from flowrl.engines.models.offload import named_weights
from flowrl.engines.train.random_state import random_state, restore_random_state

MODEL, OPTIMIZER = "model.", "optimizer."
"""What the names of tensors begin with."""


class Checkpointed(Protocol):
    """What an engine shows of itself."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def group(self) -> ProcessGroup | None: ...

    def position(self) -> dict[str, float]:
        """What it holds besides tensors: optimizer steps taken, the scale of a loss scaler."""
        ...

    def restore(self, position: Mapping[str, float]) -> None:
        """Takes a position again."""
        ...


@dataclass
class _Writing:
    """One save, from the copy until every rank has written."""

    folder: Path
    rank: int
    names: Sequence[tuple[str, tuple[int, ...]]]
    tensors: Sequence[Tensor]
    metadata: Metadata
    position: Mapping[str, float]
    random: Mapping[str, Any]
    beside: Mapping[str, bytes]
    places: dict[tuple[str, tuple[int, ...]], Place] = field(default_factory=dict)
    sums: dict[str, FileChecksum] = field(default_factory=dict)
    error: str | None = None
    thread: threading.Thread | None = None

    def write(self) -> None:
        """Writes this rank's files; what goes wrong is kept for `EngineCheckpoints.saved` to tell."""
        try:
            self._write()
        except OSError as error:
            self.error = told(self.folder, error)

    def _write(self) -> None:
        if self.tensors:
            name = f"rank-{self.rank:05d}.bin"
            file = ChecksummedFile(self.folder / name)
            try:
                for key, tensor in zip(self.names, self.tensors, strict=True):
                    self.places[key] = Place(name, file.align(ALIGNMENT))
                    file.write(bytes_of(tensor))
                self.sums[name] = file.finish()
            finally:
                file.close()
        name = random_file(self.rank)
        self.sums[name] = write_json_with_checksum(self.folder / name, self.random)
        for name, data in self.beside.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            self.sums[name] = write_with_checksum(self.folder / name, data)
        for folder in {self.folder, *((self.folder / name).parent for name in self.beside)}:
            sync_folder(folder)


class EngineCheckpoints:
    """Saves an engine, one save at a time. Every rank of the engine's group makes the same calls in the same order."""

    def __init__(self, engine: Checkpointed) -> None:
        self._engine = engine
        self._writing: _Writing | None = None
        self._buffers: list[Tensor] = []
        """Host memory that the last asynchronous save was copied to; the next one needs as much."""

    def save(self, folder: Path, *, asynchronous: bool = False, beside: Mapping[str, bytes] | None = None) -> None:
        """Takes the engine's state and writes it.

        Args:
            folder: an existing empty folder, which all ranks see.
            asynchronous: copy the state to host memory, return, and write while training goes on.
            beside: files that rank 0 writes too, by path below the folder.
        """
        assert self._writing is None, "the save before this one was not waited for"
        engine, rank = self._engine, _rank(self._engine.group)
        state = _state(engine, with_optimizer=engine.optimizer is not None and bool(engine.optimizer.state))
        planner, plan, metadata = _planned(state, engine.group)
        resolved = [planner.resolve_data(item) for item in plan.items]
        tensors = [tensor for tensor in resolved if isinstance(tensor, Tensor)]
        assert len(tensors) == len(resolved), "a checkpoint holds tensors alone"
        self._writing = writing = _Writing(
            folder,
            rank,
            [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items],
            self._copied(tensors) if asynchronous else tensors,
            metadata,
            engine.position(),
            random_state(),
            beside if beside and rank == 0 else {},
        )
        if asynchronous:
            # A daemon: a process that has to end does not wait for a file that nobody will read.
            writing.thread = threading.Thread(target=writing.write, name="checkpoint", daemon=True)
            writing.thread.start()
        else:
            writing.write()

    def saved(self, *, wait: bool = True) -> Saved | None:
        """What this rank has written when all ranks are done; None while one of them is not, if `wait` is false.

        Raises:
            CheckpointError: a rank could not write; all ranks raise it.
        """
        writing = self._writing
        assert writing is not None, "there is no save to wait for"
        if wait and writing.thread is not None:
            writing.thread.join()
        running = writing.thread is not None and writing.thread.is_alive()
        told_by_all = _gathered((running, writing.error, {} if running else writing.places), self._engine.group)
        if any(running for running, _, _ in told_by_all):
            return None
        self._writing = None
        for _, error, _ in told_by_all:
            if error is not None:
                raise CheckpointError(error)
        if writing.rank == 0:
            places = {key: place for _, _, written in told_by_all for key, place in written.items()}
            self._finish(writing, places)
        return Saved(writing.sums, _architecture(self._engine.model))

    def _finish(self, writing: _Writing, places: dict[tuple[str, tuple[int, ...]], Place]) -> None:
        text = index_text(writing.metadata, places, writing.position)
        try:
            writing.sums[INDEX] = write_with_checksum(writing.folder / INDEX, text.encode())
            sync_folder(writing.folder)
        except OSError as error:
            raise CheckpointError(told(writing.folder, error)) from error

    def _copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in host memory of their own. Memory that was touched before takes a copy several times faster."""
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != [(buffer.shape, buffer.dtype) for buffer in self._buffers]:
            self._buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # torch's threads meet after every tensor: 40 times slower where another program has one of their cores.
                np.copyto(np.asarray(bytes_of(buffer)), np.asarray(bytes_of(tensor)))
            else:
                buffer.copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return self._buffers


def load(engine: Checkpointed, folder: Path) -> None:
    """Brings an engine to the state that a folder holds, whatever world wrote it. Every rank of its group calls it.

    Random number generators are restored on the ranks that were there when it was saved.

    Raises:
        CheckpointError: the folder has no whole checkpoint, or one of another model; the engine is then unchanged.
    """
    index = read_index(folder)
    stored = any(name.startswith(OPTIMIZER) for name in index.tensors)
    state = _state(engine, with_optimizer=stored and engine.optimizer is not None)
    _check_fits(state, index, folder)
    read_into(state, folder, index, engine.group)
    _put(engine, state)
    engine.restore(index.position)
    own = folder / random_file(_rank(engine.group))
    if own.is_file():
        restore_random_state(json.loads(own.read_text(encoding="utf-8")))


def told(folder: Path, error: OSError) -> str:
    """The sentence for a folder that cannot be written."""
    return (
        f"the checkpoint cannot be written to {folder} ({error.strerror}); make room or set output to another disk: "
        f"the checkpoints before it are whole, and resume=auto goes on from the newest"
    )


def random_file(rank: int) -> str:
    """Where a rank's random number generators are."""
    return f"random-{rank:05d}.json"


def _state(engine: Checkpointed, *, with_optimizer: bool) -> dict[str, Any]:
    """Name -> the engine's own tensors (DTensors where they are sharded); of tied weights the first name alone, and
    none that are not trained: beside an adapter those are the model's that every run begins with."""
    twice = {name for names, _ in named_weights(engine.model) for name in names[1:]}
    weights = get_model_state_dict(engine.model, options=StateDictOptions(ignore_frozen_params=True))
    state = {MODEL + name: weight for name, weight in weights.items() if name not in twice}
    if with_optimizer:
        assert engine.optimizer is not None
        # Any: torch's type covers flattened dictionaries too.
        moments: Any = get_optimizer_state_dict(engine.model, engine.optimizer)["state"]
        state |= {f"{OPTIMIZER}{name}.{key}": value for name, of in moments.items() for key, value in of.items()}
    return state


def _put(engine: Checkpointed, state: Mapping[str, Any]) -> None:
    """Gives the engine its tensors again, for strategies whose state dictionaries are copies."""
    weights = {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
    # Not strict: the second names of tied weights are missing, and what is not trained.
    set_model_state_dict(engine.model, weights, options=StateDictOptions(strict=False))
    if engine.optimizer is None or not any(name.startswith(OPTIMIZER) for name in state):
        return
    optimizer: Any = get_optimizer_state_dict(engine.model, engine.optimizer)
    for name, of in optimizer["state"].items():
        of |= {key: state[f"{OPTIMIZER}{name}.{key}"] for key in of}
    set_optimizer_state_dict(engine.model, engine.optimizer, optimizer)


def _planned(state: dict[str, Any], group: ProcessGroup | None) -> tuple[DefaultSavePlanner, SavePlan, Metadata]:
    """What this rank writes, and what all ranks write together."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, is_coordinator=_rank(group) == 0)
    # Every rank makes the same plan from the same parts, so that none has to be sent back.
    plans, metadata = planner.create_global_plan(_gathered(planner.create_local_plan(), group))
    return planner, planner.finish_plan(plans[_rank(group)]), metadata


def _check_fits(state: Mapping[str, Any], index: Index, folder: Path) -> None:
    for name in [*state, *index.tensors]:
        if name not in index.tensors or name not in state:
            has, lacks = ("the checkpoint", "the model here") if name in index.tensors else ("the model", folder)
            raise CheckpointError(
                f"the checkpoint in {folder} is of another model: {has} has {name}, which {lacks} has not; "
                f"resume with the model that the run began with"
            )
        size, dtype = list(state[name].shape), str(state[name].dtype).removeprefix("torch.")
        stored = index.tensors[name]
        if (stored["size"], stored["dtype"]) != (size, dtype):
            raise CheckpointError(
                f"the checkpoint in {folder} is of another model: {name} is {stored['dtype']} {stored['size']} there "
                f"and {dtype} {size} here; resume with the model that the run began with"
            )


def _architecture(model: nn.Module) -> str:
    return f"{type(model).__name__}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else distributed.get_rank(group)


def _gathered(value: Any, group: ProcessGroup | None) -> list[Any]:
    """This value of every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values
