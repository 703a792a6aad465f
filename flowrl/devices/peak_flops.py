"""Peak FLOP/s of GPUs, the denominator of model FLOPs utilization (MFU)."""

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
