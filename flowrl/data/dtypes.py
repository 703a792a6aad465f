"""Names of dtypes in settings and files, such as `bfloat16`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that models support."""


def torch_dtype(name: str) -> "torch.dtype":
    import torch  # noqa: PLC0415 (flowrl plan loads no torch)

    dtype = vars(torch).get(name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a torch dtype"
    return dtype


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")
