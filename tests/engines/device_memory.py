"""Memory of the current GPU."""

import torch

from flowrl.controller.host.host import release_cached_memory


def reserved_bytes() -> int:
    """Returns the bytes that torch keeps from other processes after an eviction, without the workspaces of cuBLAS."""
    torch._C._cuda_clearCublasWorkspaces()
    release_cached_memory()
    return torch.cuda.memory_reserved()
