"""Checksums of an engine's training state, which show whether two engines are bitwise identical."""

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowrl.devices.device import local_tensor
from flowrl.engines.checkpoint.shards import tensor_bytes
from flowrl.engines.train.base import SavedEngine


def state_checksums(engine: SavedEngine) -> dict[str, Any]:
    """Returns the checksums of the trained weights and optimizer tensors of this rank, and the engine's counters.

    The result has plain values: `tensors` maps a name to its `crc32` and `norm` (L2, in float64), and `counters` is
    `engine.counters()`. For a sharded tensor, both are those of this rank's shard.
    """
    state = engine.save_state(with_optimizer=engine.has_optimizer_state)
    return {"tensors": {name: _checksum(value) for name, value in state.items()}, "counters": engine.counters()}


def _checksum(value: Tensor) -> Mapping[str, float]:
    local = local_tensor(value)
    return {"crc32": zlib.crc32(tensor_bytes(local)), "norm": float(local.detach().double().norm())}
