"""Reduces per-token losses to a scalar.

Shape suffixes: B rows, T token positions.

The denominator is that of the whole optimizer step, over all ranks and micro-batches, and is passed in. So the parts of
a step add up to the step's loss and gradient, however it was split: sum, never average, over parts.
"""

from typing import Literal, get_args

from torch import Tensor

from flowrl.algorithms.masks import masked_tokens

AggregationMode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: AggregationMode,
    denominator: Tensor | float,
    scale: float | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the step's loss, a scalar.

        token_mean                sum over tokens / denominator (tokens)
        seq_mean_token_sum        sum over tokens / denominator (rows)
        seq_mean_token_mean       sum over rows of the row's token mean / denominator (rows)
        seq_mean_token_sum_norm   sum over tokens / (denominator (rows) * scale)

    Arguments:
        loss: [B, T], per token.
        mask: bool [B, T], the tokens that count. The tokens of a row must not be divided over parts.
        mode: see above.
        denominator: count of the whole step: the sum over all parts of `aggregation_count` for this mode, a number or
            a scalar tensor. If it is 0 no part has a token, and the result is 0, with a gradient of 0.
        scale: > 0, the constant of seq_mean_token_sum_norm, the longest response that can be, in tokens; for no other
            mode.
    Returns: a scalar, differentiable in the loss. A row without a true position adds 0.
    Raises: ValueError on an unknown mode, a scale that is missing or not wanted or not above 0, a negative denominator
        given as a number, shapes that differ, a mask that is not bool.

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
    # Counts are whole numbers, so an empty step is the only one that this changes: 0 / 1 instead of 0 / 0.
    return rows_B.sum() / (denominator + (denominator == 0))


def aggregation_count(mask: Tensor, *, mode: AggregationMode) -> Tensor:
    """Returns this micro-batch's contribution to the step's denominator, an int64 scalar.

    Arguments:
        mask: bool [B, T].
        mode: of `aggregate`.
    Returns: the number of true positions for token_mean, and for the others the number of rows that have one. A row
        without any (a filtered row, one that fills up a micro-batch) counts nowhere.
    Raises: ValueError on an unknown mode or a mask that is not bool.
    """
    _check_mode(mode)
    masked_tokens(mask)
    return mask.sum() if mode == "token_mean" else mask.any(-1).sum()


def _check(mode: AggregationMode, denominator: Tensor | float, scale: float | None) -> None:
    _check_mode(mode)
    if mode == "seq_mean_token_sum_norm":
        if scale is None or not scale > 0:
            raise ValueError(f"scale is {scale}, {mode} needs one above 0: the longest response that can be, in tokens")
    elif scale is not None:
        raise ValueError(f"scale is {scale}, but {mode} has none: leave it out, or use seq_mean_token_sum_norm")
    # A tensor is not looked at: that would wait for the device.
    if not isinstance(denominator, Tensor) and not denominator >= 0:
        raise ValueError(f"denominator is {denominator}, it is a count and must be 0 or more")


def _check_mode(mode: AggregationMode) -> None:
    if mode not in get_args(AggregationMode):
        raise ValueError(f"mode is {mode!r}, it must be one of {', '.join(get_args(AggregationMode))}")
