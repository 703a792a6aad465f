"""Norm-wise comparisons of tensors, whose bounds hold for every CPU, kernel and summation order."""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

FLOAT64_RTOL = 1e-9
"""Bound for two float64 computations that differ in summation order only."""

Tensors = Tensor | Sequence["Tensors | float"] | Mapping[str, "Tensors | Sequence[float]"]


def reduction_rtol(dtype: torch.dtype, *, length: int, depth: int) -> float:
    """Returns a bound on the relative error between two summation orders.

    Args:
        dtype: dtype of the sums.
        length: length of the longest reduction, such as the inner size of the largest matrix product.
        depth: number of consecutive reductions.
    """
    return torch.finfo(dtype).eps * length * depth


def random_rounding_rtol(dtype: torch.dtype, *, length: int, depth: int) -> float:
    """Returns a tighter bound than `reduction_rtol`, for rounding errors with random signs.

    The error of a sum of n terms then grows with sqrt(n) instead of n (Higham and Mary 2019, doi 10.1137/18M1226312).

    Takes the same arguments.
    """
    return torch.finfo(dtype).eps * sqrt(length) * depth


FLOAT32_RTOL = reduction_rtol(torch.float32, length=128, depth=2 * 7)
"""Bound for a float32 pass of a model of `tests.engines.tiny`: two layers of seven products of at most 128 terms."""


def assert_norm_close(actual: Tensors, expected: Tensors, rtol: float | None = None) -> None:
    """Asserts that the error of each tensor is small relative to its L2 norm.

    In a mapping or a sequence, the norm of a tensor counts at least as that of a tensor of typical magnitude, because
    some gradients are zero in exact arithmetic (key biases).

    Args:
        actual: a tensor, or nested mappings and sequences of tensors and floats.
        expected: the same structure.
        rtol: bound; by default 1e-9 for float64 and `FLOAT32_RTOL` for float32.
    """
    pairs = list(_pairs(actual, expected, ""))
    size = sum(wanted.numel() for _, _, wanted in pairs)
    typical = sqrt(sum(_norm(wanted) ** 2 for _, _, wanted in pairs) / size) if size else 0.0
    errors = {}
    for name, found, wanted in pairs:
        bound = rtol if rtol is not None else FLOAT64_RTOL if wanted.dtype == torch.float64 else FLOAT32_RTOL
        scale = max(_norm(wanted), typical * sqrt(wanted.numel()))
        error = _norm(found.double() - wanted.double())
        if not error <= bound * scale:
            errors[name] = error / scale if scale else error
    assert errors == {}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the L2 norm of the error, relative to the norm of `expected`."""
    return _norm(actual.double() - expected.double()) / _norm(expected)


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.detach().double()).item()


def _pairs(actual, expected, name: str):
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for key in expected:
            yield from _pairs(actual[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, Tensor):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
        yield name, actual, expected
    elif isinstance(expected, float):
        yield name, torch.tensor(actual), torch.tensor(expected)
    else:
        assert len(actual) == len(expected)
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _pairs(one, other, f"{name}[{i}]")
