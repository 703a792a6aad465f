"""Types of settings, for the keyword-only parameters of the functions of flowrl.algorithms.

`flowrl.config.algorithm.declarations` evaluates the annotations of these parameters in the namespace of this module,
without an import of the functions, which would import torch.
"""

from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

__all__ = [
    "Annotated", "ColumnNames", "Constant", "Fraction", "Ge", "Gt", "LabelSmoothing", "Literal", "NonNegativeFloat",
    "Numbers", "PositiveFloat", "PositiveInt", "is_constant",
]  # fmt: skip

T = TypeVar("T")

_CONSTANT = "constant"

Constant = Annotated[T, _CONSTANT]
"""Type of a keyword-only parameter that is not a setting, such as an epsilon."""

Fraction = Annotated[float, Ge(0), Le(1)]
LabelSmoothing = Annotated[float, Ge(0), Lt(0.5)]
Numbers = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
ColumnNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
"""Names of columns of the batch, which the function receives as its input `columns`."""


def is_constant(annotation: object) -> bool:
    """Returns whether a parameter with this annotation is a `Constant`."""
    return _CONSTANT in getattr(annotation, "__metadata__", ())
