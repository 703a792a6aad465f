"""The random number generators of a process, as plain values: torch, its GPU, NumPy and Python."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Where every generator of this process stands, as JSON has it. Any: each library's own numbers."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    state = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [kind, base64.b64encode(np.asarray(keys, dtype=np.uint32).tobytes()).decode(), *rest],
        "python": [version, list(numbers), gauss],
    }
    # A process without a GPU at work has none to ask, and asking would start one.
    if torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Goes on where `random_state` was taken."""
    torch.set_rng_state(_tensor(state["torch"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
