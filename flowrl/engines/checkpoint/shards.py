"""How torch's distributed checkpoint is stored here: one file of raw tensors per rank, and one index in JSON.

torch decides who writes which piece of which tensor, and which pieces a rank of another world reads. Its own storage
writes pickles, which run code when they are read, and tells of a full disk by an exception that is no `Exception`.

An index is `{"format", "position", "tensors": {name: {"dtype", "size", "chunks": [{"offsets", "sizes", "file",
"start"}]}}}`; `start` is the byte of the file at which the chunk begins, a multiple of 64.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flowrl.data.checksums import CheckpointError

FORMAT = 1
ALIGNMENT = 64
INDEX = "index.json"


class Place(NamedTuple):
    """Where a piece of a tensor is."""

    file: str
    start: int


Places = Mapping[tuple[str, tuple[int, ...]], Place]
"""(name of the tensor, offsets of the piece in it) -> where it is."""


@dataclass(frozen=True)
class Index:
    """What the files of a folder hold."""

    position: Mapping[str, float]
    """What the engine held besides tensors."""
    tensors: Mapping[str, Any]
    """As the file has it."""

    def metadata(self) -> Metadata:
        """The same for torch."""
        tensors, places = {}, {}
        for name, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
            properties = TensorProperties(dtype=dtype_of(tensor["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
            for chunk in tensor["chunks"]:
                places[MetadataIndex(name, chunk["offsets"])] = (chunk, properties.dtype)
        return Metadata(tensors, storage_data=places)


def dtype_of(name: str) -> torch.dtype:
    """The type of this name, as `float32`."""
    dtype = vars(torch).get(name)
    assert isinstance(dtype, torch.dtype), f"{name} is no type of torch's"
    return dtype


def index_text(metadata: Metadata, places: Places, position: Mapping[str, float]) -> str:
    """The index of tensors whose pieces were written at these places."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
        chunks = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **places[name, tuple(chunk.offsets)]._asdict()}
            for chunk in tensor.chunks
        ]
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return json.dumps({"format": FORMAT, "position": dict(position), "tensors": tensors})


def read_index(folder: Path) -> Index:
    """The index of a folder. Raises CheckpointError for one that is missing, damaged or of a newer format."""
    try:
        read = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        number = read["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no checkpoint: {INDEX} cannot be read ({error})") from error
    if number != FORMAT:
        raise CheckpointError(
            f"{folder} has format {number}, and this version reads {FORMAT}: use the version that wrote it"
        )
    return Index(read["position"], read["tensors"])


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class ShardReader(StorageReader):
    """Reads a folder for `torch.distributed.checkpoint.load`. Files are mapped: only what a rank needs is read."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._metadata = folder, index.metadata()
        self._maps: dict[str, np.ndarray] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """There is nothing to begin again."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> Tensor:
        chunk, dtype = self._metadata.storage_data[item.storage_index]
        sizes = torch.Size(chunk["sizes"])
        num_bytes = sizes.numel() * dtype.itemsize
        stored = self._mapped(chunk["file"])[chunk["start"] : chunk["start"] + num_bytes]
        if len(stored) < num_bytes:
            raise CheckpointError(f"{self._folder / chunk['file']} ends before {item.storage_index.fqn} does")
        tensor = torch.from_numpy(stored).view(dtype).reshape(sizes)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        return tensor

    def _mapped(self, file: str) -> np.ndarray:
        if file not in self._maps:
            # Mode c: torch takes no read-only array without a warning; nothing is written.
            self._maps[file] = np.memmap(self._folder / file, dtype=np.uint8, mode="c")
        return self._maps[file]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def read_into(state: dict[str, Any], folder: Path, index: Index, group: ProcessGroup | None) -> None:
    """Fills tensors in place by name, DTensors from the pieces that this rank needs. All ranks of the group call it.

    Raises:
        CheckpointError: a file is missing or too short.
    """
    with warnings.catch_warnings():
        # It warns that one process alone needs no group.
        warnings.simplefilter("ignore", UserWarning)
        try:
            load_planned(
                state,
                storage_reader=ShardReader(folder, index),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:  # which is no Exception, and so would pass every handler
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be loaded: {cause}") from error
