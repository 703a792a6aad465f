"""Checks and zeroes masked inputs, and reduces tensors over masks.

Shape suffixes: B rows, T token positions of right- or left-padded rows.

In all functions of this package, masked positions affect neither values nor gradients, even if they are NaN or
infinite. Inputs are therefore zeroed there before any arithmetic, because zero times NaN is NaN.
"""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Promotes half precision and integers to float32; float64 is kept."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked_tokens(mask: Tensor, **tokens: Tensor) -> list[Tensor]:
    """Checks the shapes of token tensors, promotes them to at least float32, and zeroes masked positions.

    Args:
        mask: bool [B, T], true for positions that count.
        tokens: tensors [B, T] of any real dtype; the keyword is the name used in errors.
    Returns: the tensors in the same order.
    Raises: ValueError if the mask is not bool, or a shape differs. Broadcasting [B, 1] to [B, T] is rejected, because
        it is usually a mistake.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}, but must be torch.bool: pass `mask.bool()`")
    if mask.dim() != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}, but must be [B, T]")
    for name, values in tokens.items():
        if values.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, but the mask has {list(mask.shape)}")
    return [at_least_float32(values).masked_fill(~mask, 0) for values in tokens.values()]


def masked_rows(mask: Tensor, **rows: Tensor) -> list[Tensor]:
    """Returns the row tensors in the same order. Raises ValueError unless each is [B], for a mask [B, T]."""
    for name, values in rows.items():
        if values.shape != mask.shape[:1]:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, but must have one entry per row of the mask, "
                f"{list(mask.shape[:1])}"
            )
    return list(rows.values())


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of values [B, T] over the true positions of the mask, a scalar; 0 if there are none.

    Raises ValueError for different shapes or a mask that is not bool.
    """
    (values,) = masked_tokens(mask, values=values)
    return values.sum() / mask.sum().clamp(min=1)


def row_mean(values_BT: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean [B, 1] over each row's true positions, 0 for empty rows. Masked values must already be 0."""
    return values_BT.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_range(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the minimum and maximum of values [B, T] over the true positions of the mask, without gradient.

    Returns (inf, -inf) for an empty mask, so that results of micro-batches merge by min and max. Raises ValueError for
    different shapes or a mask that is not bool.
    """
    (values,) = masked_tokens(mask, values=values.detach())
    if values.numel() == 0:
        return values.new_tensor(torch.inf), values.new_tensor(-torch.inf)
    return values.masked_fill(~mask, torch.inf).amin(), values.masked_fill(~mask, -torch.inf).amax()


def last_masked(mask: Tensor) -> Tensor:
    """Returns a bool mask [B, T] of the last true position of each row; empty rows have none."""
    num_true_from_here = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (num_true_from_here == 1)
