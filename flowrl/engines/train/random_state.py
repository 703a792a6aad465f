"""Saves and restores the random number generators of a process: torch, CUDA, NumPy and Python."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Returns the state of all generators as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state = {
        "torch": _encode(torch.get_rng_state()),
        "numpy": [kind, base64.b64encode(np.asarray(keys, dtype=np.uint32).tobytes()).decode(), *rest],
        "python": [version, list(words), gauss],
    }
    # Reading the state would initialize CUDA.
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores all generators from the result of `random_state`."""
    torch.set_rng_state(_decode(state["torch"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
