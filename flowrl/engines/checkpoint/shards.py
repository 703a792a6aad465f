"""The storage format of checkpoints: one file of raw tensors per rank, and one JSON index.

torch's distributed checkpoint assigns the chunks of each tensor to ranks for reading and writing. torch's own storage
format is not used, because it contains pickles. Loading a pickle can run code.

The index is `{"format", "position", "tensors": {name: {"dtype", "size", "chunks": [{"offsets", "sizes", "file",
"start"}]}}}`. `position` is the result of the engine's `counters`. `start` is the byte offset of the chunk in the file.
"""

import json
import math
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

from flowrl.config.source import read_json
from flowrl.data.checksums import CheckpointError
from flowrl.data.dtypes import dtype_name, torch_dtype

FORMAT = 1
ALIGNMENT = 64
INDEX = "index.json"


class ShardLocation(NamedTuple):
    """File and byte offset of a chunk of a tensor."""

    file: str
    start: int


ShardLocations = Mapping[tuple[str, tuple[int, ...]], ShardLocation]
"""Maps (tensor name, offsets of the chunk in the tensor) to the location of the chunk."""


@dataclass(frozen=True)
class Index:
    """The parsed index of a checkpoint folder."""

    engine_state: Mapping[str, float]
    """Result of the engine's `counters`."""
    tensors: Mapping[str, Any]
    """Maps a tensor name to the tensor's dtype, shape (`size`) and stored parts (`chunks`). The module docstring shows
    the format.
    """

    def metadata(self) -> Metadata:
        """Converts the index to the metadata of torch's distributed checkpoint."""
        tensors, chunk_data = {}, {}
        for name, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
            properties = TensorProperties(dtype=torch_dtype(tensor["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
            for chunk in tensor["chunks"]:
                chunk_data[MetadataIndex(name, chunk["offsets"])] = (chunk, properties.dtype)
        return Metadata(tensors, storage_data=chunk_data)


def format_index(metadata: Metadata, locations: ShardLocations, engine_state: Mapping[str, float]) -> str:
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = [
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                **locations[name, tuple(chunk.offsets)]._asdict(),
            }
            for chunk in tensor.chunks
        ]
        dtype = dtype_name(tensor.properties.dtype)
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return json.dumps({"format": FORMAT, "position": dict(engine_state), "tensors": tensors})


def read_index(folder: Path) -> Index:
    """Reads the index of a folder. Raises CheckpointError if the index is missing, corrupt or has another format."""
    try:
        index = read_json(folder / INDEX)
        index_format = index["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has no checkpoint: {INDEX} cannot be read ({error})") from error
    if index_format != FORMAT:
        raise CheckpointError(
            f"{folder} has format {index_format}, but this version reads format {FORMAT}: use the version that wrote it"
        )
    return Index(index["position"], index["tensors"])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor, without a copy if the tensor is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class ShardReader(StorageReader):
    """Storage reader for `torch.distributed.checkpoint.load`. It memory-maps files, so that each rank reads only its
    chunks.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._metadata = folder, index.metadata()
        self._maps: dict[str, np.ndarray] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Does nothing, because each load creates a new reader."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the reader already has the metadata."""

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
            raise CheckpointError(f"{self._folder / chunk['file']} is too short for {item.storage_index.fqn}")
        tensor = torch.from_numpy(stored).view(dtype).reshape(sizes)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        return tensor

    def _mapped(self, file: str) -> np.ndarray:
        if file not in self._maps:
            # Copy-on-write mode, because torch warns about read-only arrays.
            self._maps[file] = np.memmap(self._folder / file, dtype=np.uint8, mode="c")
        return self._maps[file]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def read_tensor(folder: Path, index: Index, name: str) -> Tensor:
    """Reads a full tensor, which several ranks may have written in parts. Memory holds only the tensor and one part.

    Raises CheckpointError if a file is missing or too short.
    """
    stored, dtype = index.tensors[name], torch_dtype(index.tensors[name]["dtype"])
    size = torch.Size(stored["size"])
    chunks = [chunk for chunk in stored["chunks"] if math.prod(chunk["sizes"])]  # a rank may have no rows
    full = torch.empty(size, dtype=dtype) if len(chunks) != 1 else None
    for chunk in chunks:
        shape = torch.Size(chunk["sizes"])
        num_bytes = shape.numel() * dtype.itemsize
        try:
            # Not memory-mapped, so that the pages of the file do not add to the memory of this process.
            values = np.fromfile(folder / chunk["file"], np.uint8, num_bytes, offset=chunk["start"])
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be loaded: {chunk['file']}: {error.strerror}") from error
        if len(values) < num_bytes:
            raise CheckpointError(f"{folder / chunk['file']} is too short for {name}")
        part = torch.from_numpy(values).view(dtype).reshape(shape)
        if full is None:
            return part
        target = full
        for dimension, (start, length) in enumerate(zip(chunk["offsets"], shape, strict=True)):
            target = target.narrow(dimension, start, length)
        target.copy_(part)
    assert full is not None, "a single part is returned above"
    return full


def read_into(state: dict[str, Any], folder: Path, index: Index, group: ProcessGroup | None) -> None:
    """Reads the tensors in `state` in place, by name. All ranks must call this together. Raises CheckpointError if a
    file is missing or too short.
    """
    with warnings.catch_warnings():
        # torch warns about a missing process group, which a single process does not need.
        warnings.simplefilter("ignore", UserWarning)
        try:
            load_planned(
                state,
                storage_reader=ShardReader(folder, index),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:  # a BaseException, but no Exception
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be loaded: {cause}") from error
