"""Masked tensors: checks, reductions over masks, and the aggregation of token losses to a scalar.

Shape suffixes: B rows, T token positions of right- or left-padded rows.

In all functions of `flowrl.algorithms`, masked positions affect neither values nor gradients, even if they are NaN or
infinite. Inputs are therefore set to 0 at masked positions before any arithmetic, because zero times NaN is NaN.
"""

from typing import Literal, get_args

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Converts half precision and integers to float32. float64 tensors keep their dtype."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked_tokens(mask: Tensor, **tokens: Tensor) -> list[Tensor]:
    """Checks the shapes of token tensors, converts them to at least float32, and zeroes masked positions.

    Args:
        mask: bool [B, T], true for positions that count.
        tokens: tensors [B, T] of any real dtype, each with its name in error messages as keyword.
    Returns: the tensors in the same order.
    Raises: ValueError if the mask is not bool, or a shape differs. A tensor [B, 1] is not broadcast to [B, T], because
        this is usually a mistake.
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
    """Returns the row tensors in the same order. Raises ValueError unless each has shape [B], for a mask [B, T]."""
    for name, values in rows.items():
        if values.shape != mask.shape[:1]:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, but must have one entry per row of the mask, "
                f"{list(mask.shape[:1])}"
            )
    return list(rows.values())


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of values [B, T] over the true positions of the mask, a scalar. It is 0 if the mask is empty.

    Raises ValueError for mismatched shapes or a mask that is not bool.
    """
    (values,) = masked_tokens(mask, values=values)
    return values.sum() / mask.sum().clamp(min=1)


def row_mean(values_BT: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean [B, 1] over each row's true positions, 0 for empty rows. The values must be 0 where the mask is
    false.
    """
    return values_BT.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_range(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the minimum and maximum of values [B, T] over the true positions of the mask, without gradient.

    For an empty mask, the result is (inf, -inf). Results of micro-batches can therefore be merged with min and max.
    Raises ValueError for mismatched shapes or a mask that is not bool.
    """
    (values,) = masked_tokens(mask, values=values.detach())
    if values.numel() == 0:
        return values.new_tensor(torch.inf), values.new_tensor(-torch.inf)
    return values.masked_fill(~mask, torch.inf).amin(), values.masked_fill(~mask, -torch.inf).amax()


def last_masked(mask: Tensor) -> Tensor:
    """Returns a bool mask [B, T] of the last true position of each row. Empty rows have no true position in the
    result.
    """
    num_true_from_here = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (num_true_from_here == 1)


# Aggregation. The denominator counts the tokens or rows of the whole optimizer step, over all ranks and micro-batches.
# The results of micro-batches must therefore be summed, not averaged; their sum does not depend on the split.

AggregationMode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: AggregationMode,
    denominator: Tensor | float,
    scale: float | None = None,
) -> Tensor:
    """Returns this micro-batch's term of the step's loss, a scalar.

        token_mean                sum over tokens / denominator (tokens)
        seq_mean_token_sum        sum over tokens / denominator (rows)
        seq_mean_token_mean       sum over rows of the row's token mean / denominator (rows)
        seq_mean_token_sum_norm   sum over tokens / (denominator (rows) * scale)

    Args:
        loss: [B, T], per token.
        mask: bool [B, T], true for tokens that count. All tokens of a row must be in the same micro-batch.
        mode: one of the four formulas above.
        denominator: over the whole step, the number of true positions of the mask for token_mean, and otherwise the
            number of rows that have such a position. A number or a scalar tensor. 0 gives loss 0.
        scale: > 0, maximum response length in tokens. Required for seq_mean_token_sum_norm, rejected for other modes.
    Returns: a scalar, differentiable in the loss. Rows without a true position contribute 0.
    Raises: ValueError for invalid settings, mismatched shapes, or a mask that is not bool.

    token_mean: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.3. seq_mean_token_mean: Shao et al.
    2024 (GRPO), https://arxiv.org/abs/2402.03300, eq. (3). seq_mean_token_sum_norm: Liu et al. 2025 (Dr. GRPO),
    https://arxiv.org/abs/2503.20783, section 3.2.
    """
    _check(mode, denominator, scale)
    (loss_BT,) = masked_tokens(mask, loss=loss)
    rows_B = loss_BT.sum(-1)
    if mode == "seq_mean_token_mean":
        rows_B = rows_B / mask.sum(-1).clamp(min=1)
    if scale is not None:
        rows_B = rows_B / scale
    # Changes only an empty step, to 0 / 1 instead of 0 / 0, because counts are integers.
    return rows_B.sum() / (denominator + (denominator == 0))


def _check(mode: AggregationMode, denominator: Tensor | float, scale: float | None) -> None:
    _check_mode(mode)
    if mode == "seq_mean_token_sum_norm":
        if scale is None or not scale > 0:
            raise ValueError(f"scale is {scale}, but {mode} requires scale > 0: the maximum response length in tokens")
    elif scale is not None:
        raise ValueError(f"scale is {scale}, but {mode} does not use it: remove it, or use seq_mean_token_sum_norm")
    # Reading a tensor would synchronize with the device.
    if not isinstance(denominator, Tensor) and not denominator >= 0:
        raise ValueError(f"denominator is {denominator}, but must be a count of 0 or more")


def _check_mode(mode: AggregationMode) -> None:
    if mode not in get_args(AggregationMode):
        raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(get_args(AggregationMode))}")
