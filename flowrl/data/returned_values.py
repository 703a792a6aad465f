"""Checks of values that user functions return. `what` is the name of the function in error messages."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowrl.config import UserError


def per_token(value: object, mask_BT: Tensor, what: str) -> Tensor:
    """Returns `value`. Raises `UserError` unless it is a tensor with the shape of the mask."""
    if isinstance(value, Tensor) and value.shape == mask_BT.shape:
        return value
    raise UserError(
        f"{what} returned {described(value)}, it must return a tensor [B, T], here {list(mask_BT.shape)}: one value "
        f"per token, and 0 where the mask is false"
    )


def loss_and_metrics(result: object, mask_BT: Tensor, what: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a loss per token and its metrics. Raises `UserError` for a wrong shape or type, or if the loss has no
    gradient.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise UserError(
            f"{what} returned {described(result)}, it must return (loss [B, T], a dictionary of metrics [B, T]); the "
            f"dictionary may be empty"
        )
    loss_BT = per_token(result[0], mask_BT, what)
    if torch.is_grad_enabled() and not loss_BT.requires_grad:
        raise UserError(
            f"{what} returned a loss without a gradient: compute it from logprobs, without detach or no_grad"
        )
    return loss_BT, {name: per_token(value, mask_BT, f"{what} (metric {name})") for name, value in result[1].items()}


def weights_or_mask(result: object, mask_BT: Tensor, what: str) -> Tensor:
    """Returns the weights or the mask of an off-policy correction. Raises `UserError` if a weight is negative or NaN.

    Synchronizes with the device.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"{what} returned {described(result)}, it must return (weights or a bool mask [B, T], a dictionary of "
            f"metrics)"
        )
    weights_BT = per_token(result[0], mask_BT, what)
    if weights_BT.dtype != torch.bool and not bool(((weights_BT >= 0) | ~mask_BT).all()):
        raise UserError(
            f"{what} returned weights that are negative or NaN: a weight is at least 0, and 0 leaves a token out"
        )
    return weights_BT


def scalar(value: object, what: str) -> Tensor:
    """Returns `value`. Raises `UserError` unless it is a scalar tensor."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    raise UserError(
        f"{what} returned {described(value)}, it must return a scalar tensor: the sum divided by denominator"
    )


def described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    return f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
