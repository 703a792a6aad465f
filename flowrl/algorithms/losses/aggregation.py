"""Reduces per-token losses to a scalar.

Shape suffixes: B rows, T token positions.

The denominator counts the tokens or rows of the whole optimizer step, over all ranks and micro-batches. The results of
micro-batches must therefore be summed, not averaged; their sum does not depend on the split.
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

    Args:
        loss: [B, T], per token.
        mask: bool [B, T], true for tokens that count. All tokens of a row must be in the same micro-batch.
        mode: see above.
        denominator: sum of `aggregation_count` over the whole step, a number or a scalar tensor. 0 gives loss 0.
        scale: > 0, maximum response length in tokens; required for seq_mean_token_sum_norm, invalid otherwise.
    Returns: a scalar, differentiable in the loss. Rows without a true position contribute 0.
    Raises: ValueError for invalid settings, different shapes, or a mask that is not bool.

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


def aggregation_count(mask: Tensor, *, mode: AggregationMode) -> Tensor:
    """Returns this micro-batch's contribution to the step's denominator, an int64 scalar.

    It is the number of true positions for token_mean. Other modes count the rows that have a true position, which
    excludes filtered and padding rows. Raises ValueError for an unknown mode or a mask that is not bool.
    """
    _check_mode(mode)
    masked_tokens(mask)
    return mask.sum() if mode == "token_mean" else mask.any(-1).sum()


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
