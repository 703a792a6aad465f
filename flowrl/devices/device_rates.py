"""Rates of GPUs, and the part of each rate that programs reach, with the source of each number.

`flowrl plan --time` divides FLOPs and bytes by these numbers. flowrl has measured only the parts that passes and copies
to pinned host memory reach, on one H200.
"""

from dataclasses import dataclass

_DENSE_BFLOAT16: tuple[tuple[str, float], ...] = (
    # Names of PCIe and NVL cards come before those of SXM modules, of which they contain the name.
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
)
"""Part of the device name -> peak FLOP/s of dense bfloat16 matrix products, without sparsity. The first match is used.

From NVIDIA's data sheets of these products. For GPUs whose figures are "with sparsity", the data sheets list twice
these values.
"""


def find_peak_flops(device_name: str) -> float | None:
    """Returns the peak FLOP/s of dense bfloat16 matrix products of a device, or None for an unknown device.

    A MIG instance has only a part of its GPU, and the peak of this part is unknown.
    """
    words = f" {device_name.replace('-', ' ')} "
    if " MIG " in words:
        return None
    return next((peak for name, peak in _DENSE_BFLOAT16 if f" {name} " in words), None)


@dataclass(frozen=True)
class DeviceRates:
    """Peak rates of a GPU and of its links, in one direction, from NVIDIA's data sheets of the GPU and its DGX."""

    name: str
    flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    float32_flops: float
    """FLOP/s of float32 matrix products without TF32."""
    memory_gb: float
    """Size of the memory in GB (10^9 bytes)."""
    memory: float
    """Bytes per second between the GPU and its memory."""
    nvlink: float
    """Bytes per second to the other GPUs of the node. The data sheets list the sum of both directions."""
    host: float
    """Bytes per second to the host memory, over PCIe with 16 lanes."""
    network: float
    """Bytes per second to other nodes. A DGX has one network adapter per GPU."""


def _rates(name: str, **rates: float) -> DeviceRates:
    peak = find_peak_flops(name)
    assert peak is not None, "the GPU is in the table of peaks"
    return DeviceRates(name, peak, **rates)


_H100 = {"float32_flops": 67e12, "nvlink": 450e9, "host": 64e9, "network": 50e9}

GPUS = {
    "h100": _rates("H100", memory_gb=80, memory=3.35e12, **_H100),
    "h200": _rates("H200", memory_gb=141, memory=4.8e12, **_H100),
    "a100": _rates("A100", float32_flops=19.5e12, memory_gb=80, memory=2.039e12, nvlink=300e9, host=32e9, network=25e9),
}
"""Name of a GPU in commands -> its rates: H100, H200 and the A100 with 80 GB, as SXM modules."""


def find_rates(device_name: str) -> DeviceRates | None:
    """Returns the rates of a GPU from the name that its driver reports, or None if `GPUS` does not have this GPU.

    PCIe and NVL cards, MIG instances and the A100 with 40 GB have lower rates.
    """
    words = set(device_name.lower().replace("-", " ").split())
    if words & {"pcie", "nvl", "mig", "40gb"}:
        return None
    return next((rates for name, rates in GPUS.items() if name in words), None)


@dataclass(frozen=True)
class AssumedRate:
    """The part of a peak rate that programs reach, or the time of an operation without a peak rate."""

    value: float
    """Fraction of the peak, bytes per second, or seconds."""
    meaning: str
    """The value in words, for `flowrl plan`."""
    source: str


TRAINING = AssumedRate(
    0.40,
    "40 % of the peak FLOP/s in passes, recomputation included",
    "1.5B, one H200, measured: 42 % with compiled layers, 32 % without; torchtitan: 33 to 39 %",
)
GENERATION = AssumedRate(
    0.50,
    "50 % of the peak FLOP/s in generation",
    "8B, 256 + 256 tokens, 44 requests/s: github.com/vllm-project/vllm/pull/11078",
)
MEMORY = AssumedRate(
    0.65,
    "65 % of the memory bandwidth in decode steps",
    "8B, one sequence, 136 tokens/s: github.com/sgl-project/sglang/issues/1008",
)
LINK = AssumedRate(
    0.80,
    "80 % of NVLink, network and PCIe",
    "360 of 450 GB/s in an all-gather of 8 x H100: github.com/NVIDIA/nccl-tests/issues/326",
)
WEIGHT_SYNC = AssumedRate(
    0.17,
    "17 % of a link in a weight sync",
    "8.25 GB/s over 400 Gb/s, 32 x H100: verl, checkpoint_engine/README.md",
)
PAGEABLE_COPY = AssumedRate(
    2.8e9,
    "2.8 GB/s between the GPU and host memory that is not pinned",
    "H200: github.com/sgl-project/sglang/pull/32032",
)
DECODE_WAIT = AssumedRate(
    0.002,
    "2 ms per decode step for vLLM's scheduler",
    "2 to 3 ms, 256 sequences: github.com/vllm-project/vllm/issues/10634",
)
EAGER_DECODE_WAIT = AssumedRate(
    0.025,
    "25 ms per decode step without CUDA graphs",
    "26 ms, with graphs 3 ms: github.com/sgl-project/sglang/pull/33293",
)
