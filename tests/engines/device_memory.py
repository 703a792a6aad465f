"""Memory of the current GPU."""

import torch


def allocated_bytes() -> int:
    """Returns the bytes that tensors use. Frees the workspaces of cuBLAS first, which torch would count."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
