"""Saves and restores the random number generators of a process: torch, CUDA, NumPy and Python."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.devices.device import get_device, used_device


def random_state() -> dict[str, Any]:
    """Returns the state of all generators as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state = {
        "torch": _encode(get_device("cpu").random_state()),
        "numpy": [kind, base64.b64encode(np.asarray(keys, dtype=np.uint32).tobytes()).decode(), *rest],
        "python": [version, list(words), gauss],
    }
    if (gpu := used_device("cuda")) is not None:
        state["cuda"] = _encode(gpu.random_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores all generators from the result of `random_state`."""
    get_device("cpu").restore_random_state(_decode(state["torch"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and (gpu := used_device("cuda")) is not None:
        gpu.restore_random_state(_decode(state["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
