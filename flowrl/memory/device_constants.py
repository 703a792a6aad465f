"""The memory of a device that does not follow from the sizes of a model, with the source of each number.

A process keeps its CUDA context and libraries until it ends. A sleeping vLLM also keeps its CUDA graphs, because
`sleep` frees only weights and KV cache. `flowrl plan` prints the constants that a plan contains.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A number of the memory estimate."""

    value: float
    """Number of bytes, a count, or a factor."""
    meaning: str
    """What the value measures, as the end of a line of `flowrl plan`."""
    source: str
    is_measured: bool = False
    """Whether flowrl's own tests have measured the value. Otherwise, `flowrl plan` marks it as estimated."""

    @property
    def shown(self) -> str:
        """The value in GB or MB, as a percentage, or as a count."""
        if self.value < 1:
            return f"{self.value:.0%}"
        for size, unit in ((1e9, "GB"), (1e6, "MB")):
            if self.value >= size:
                return f"{self.value / size:.3g} {unit}"
        return f"{self.value:g}"


CPU_PROCESS = Constant(
    430e6,
    "per process",
    "measured with tests/memory/memory_points.py",
    is_measured=True,
)
CUDA_PROCESS = Constant(
    1.06e9,
    "per process",
    "H100: github.com/NVIDIA/nccl/issues/1685",
)
VLLM_PROCESS = Constant(
    1.27 * 2**30,
    "per process, also while it sleeps",
    "GPU of 80 GB: github.com/vllm-project/vllm/pull/11743",
)
CUDA_GRAPHS = Constant(
    1.62 * 2**30,
    "per process, also while it sleeps",
    "86 graphs: github.com/vllm-project/vllm/pull/39559",
)
NCCL_CHANNELS = Constant(
    32,
    "channels per communicator",
    "8 x H100: github.com/NVIDIA/nccl/issues/1685",
)
NCCL_CHANNEL = Constant(
    10_485_760,
    "per channel",
    "8 x H100: github.com/NVIDIA/nccl/issues/1685",
)
ALL_REDUCE = Constant(
    96 * 2**20,
    "per tensor-parallel device of vLLM",
    "H100, tp 2, vLLM 0.32: custom_all_reduce.py:299,313,319, symm_mem.py:92",
)
PINNED_ROUNDING = Constant(
    2,
    "times its weights at most, kept while it is awake",
    "vLLM 0.32: cumem.py:268; torch pins powers of two",
)
SAMPLER_COPIES = Constant(
    3,
    "float32 tensors of all logits in vLLM's sampler",
    "vLLM 0.32: v1/sample/sampler.py:89,97 and its softmax",
)
TRANSFER_BUCKETS = Constant(
    2,
    "buckets of a weight sync",
    "flowrl: cuda_ipc.py, broadcast.py; vLLM 0.32: reload/layerwise.py:185",
)
FRAGMENTATION = Constant(
    0.15,
    "of the memory of a call",
    "average of eight models on A100: arxiv.org/abs/2401.08156",
)

TERMS: Mapping[str, tuple[Constant, ...]] = {
    "process": (CPU_PROCESS,),
    "CUDA context": (CUDA_PROCESS,),
    "vLLM process": (VLLM_PROCESS,),
    "CUDA graphs": (CUDA_GRAPHS,),
    "NCCL": (NCCL_CHANNELS, NCCL_CHANNEL),
    "all-reduce": (ALL_REDUCE,),
    "sleeping vLLM": (PINNED_ROUNDING,),
    "buffers": (SAMPLER_COPIES, TRANSFER_BUCKETS),
    "fragmentation": (FRAGMENTATION,),
}
"""Name of a term in the output of `flowrl plan` -> its constants."""


def nccl_bytes(num_communicators: int) -> int:
    return num_communicators * int(NCCL_CHANNELS.value * NCCL_CHANNEL.value)
