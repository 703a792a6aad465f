"""Memory of a GPU that has not been used yet."""

import torch

from tests.benchmarks.gpu.models import free_memory


def test_memory_is_freed_before_the_first_use_of_a_gpu() -> None:
    """torch cannot reset the peak before that."""
    free_memory(torch.device("cuda", 0))
