"""Records the size of the largest tensor that operations allocate, for tests of memory use."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns, optionally of one dtype."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.dtype in (None, result.dtype):
            self.elements = max(self.elements, result.numel())
        return result
