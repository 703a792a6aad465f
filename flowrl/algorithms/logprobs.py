"""Computes log-probabilities and entropies of tokens from logits.

Shape suffixes: B rows, T token positions, V vocabulary. Lower case denotes a chunk.

Column t of a result belongs to token t, which the logits at t - 1 predict. Column 0 is 0. Chunks of positions are
computed in float32; float64 inputs stay float64. Apart from the gradient, no additional tensor [B, T, V] is allocated.
`logprobs_from_hidden` also avoids the logits.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Slices = tuple[slice, slice]
"""A slice of the rows and a slice of the positions."""


class Context(Protocol):
    """Autograd context of a function. torch does not declare a type for it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    head_settings: tuple[float, float | None, bool]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


_CHUNK_ELEMENTS = 2**24
"""Maximum number of logits per chunk (64 MiB in float32). A chunk has at least one position, even if it exceeds
this.
"""


def chunks(shape: torch.Size, elements: int) -> Iterator[tuple[Slices, Slices]]:
    """Yields (slices of the logits, slices of the tokens that they predict). The chunks cover every prediction once.

    Args:
        shape: [B, T, V], of the logits. The last position predicts no token.
        elements: > 0, approximate number of logits per chunk. A chunk has at least one position.
    """
    num_rows, num_positions, vocabulary = shape
    positions_at_once = max(1, min(num_positions, elements // max(1, vocabulary)))
    rows_at_once = max(1, elements // max(1, positions_at_once * vocabulary))
    for row in range(0, num_rows, rows_at_once):
        rows = slice(row, row + rows_at_once)
        for start in range(0, num_positions - 1, positions_at_once):
            stop = min(start + positions_at_once, num_positions - 1)
            yield (rows, slice(start, stop)), (rows, slice(start + 1, stop + 1))


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns the log-probability of each token given the preceding tokens, under logits / temperature.

    Args:
        logits: [B, T, V], output of the model at each position, of any float dtype.
        tokens: int64 [B, T], input of the model, in [0, V). Padding must be a valid id.
        temperature: > 0, sampling temperature of the rollout.
    Returns: [B, T] in at least float32, differentiable once in the logits. Column t is
        `log_softmax(logits[:, t - 1] / temperature)[tokens[:, t]]`. Column 0 is 0.
    Raises: ValueError for mismatched shapes or a temperature <= 0.
    """
    _check(logits, temperature)
    if tokens.shape != logits.shape[:2]:
        raise ValueError(f"tokens have shape {list(tokens.shape)}, but must be [B, T] = {list(logits.shape[:2])}")
    return _TokenLogprobs.apply(logits, tokens, temperature)


def candidate_logprobs(logits: Tensor, candidates: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns the log-probabilities of several candidate tokens of each position, under logits / temperature.

    Args:
        logits: [B, T, V], output of the model at each position, of any float dtype.
        candidates: int64 [B, T, K], token ids in [0, V).
        temperature: > 0, sampling temperature of the rollout.
    Returns: [B, T, K] in at least float32, differentiable in the logits. Column t is
        `log_softmax(logits[:, t - 1] / temperature)[candidates[:, t]]`. Column 0 is 0.
    Raises: ValueError for mismatched shapes or a temperature <= 0.
    """
    _check(logits, temperature)
    if candidates.dim() != 3 or candidates.shape[:2] != logits.shape[:2]:
        raise ValueError(
            f"candidates have shape {list(candidates.shape)}, but must be [B, T, K] with [B, T] = "
            f"{list(logits.shape[:2])}"
        )
    scaled_BTV = logits[:, :-1].to(_result_dtype(logits)) / temperature
    logprobs_BTK = scaled_BTV.log_softmax(-1).gather(-1, candidates[:, 1:])
    return torch.nn.functional.pad(logprobs_BTK, (0, 0, 1, 0))


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns the entropy in nats of each token's distribution: -sum_v p_v log p_v.

    Args:
        logits: [B, T, V], output of the model at each position, of any float dtype; -inf excludes a token.
        temperature: > 0, sampling temperature of the rollout.
    Returns: [B, T] in at least float32, differentiable once in the logits. Column t is the entropy of
        `softmax(logits[:, t - 1] / temperature)`. Column 0 is 0.
    Raises: ValueError for a shape other than [B, T, V] or a temperature <= 0.
    """
    _check(logits, temperature)
    return _TokenEntropy.apply(logits, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_BTV: Tensor, tokens_BT: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits_BTV, tokens_BT)
        ctx.temperature = temperature
        logprobs_BT = logits_BTV.new_zeros(tokens_BT.shape, dtype=_result_dtype(logits_BTV))
        for _, predicted, scaled_btV in _scaled_chunks(logits_BTV, temperature):
            logprobs_BT[predicted] = scaled_btV.log_softmax(-1).gather(-1, tokens_BT[predicted][..., None]).squeeze(-1)
        return logprobs_BT

    # The decorator hides the signature from the type checker.
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_BT: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradient of the logits: d logp(v) / d z_u = [u = v] - p_u."""
        logits_BTV, tokens_BT = ctx.saved_tensors
        grad_logits_BTV = torch.zeros_like(logits_BTV)
        for positions, predicted, scaled_btV in _scaled_chunks(logits_BTV, ctx.temperature):
            grad_bt1 = grad_BT[predicted][..., None] / ctx.temperature
            grad_btV = scaled_btV.softmax(-1).mul_(-grad_bt1)
            grad_logits_BTV[positions] = grad_btV.scatter_add_(-1, tokens_BT[predicted][..., None], grad_bt1)
        return grad_logits_BTV, None, None


class _TokenEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_BTV: Tensor, temperature: float) -> Tensor:
        entropy_BT = logits_BTV.new_zeros(logits_BTV.shape[:2], dtype=_result_dtype(logits_BTV))
        for _, predicted, scaled_btV in _scaled_chunks(logits_BTV, temperature):
            entropy_BT[predicted] = torch.special.entr(scaled_btV.softmax(-1)).sum(-1)
        ctx.save_for_backward(logits_BTV, entropy_BT)
        ctx.temperature = temperature
        return entropy_BT

    # The decorator hides the signature from the type checker.
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_BT: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradient of the logits: d H / d z_u = -p_u (log p_u + H)."""
        logits_BTV, entropy_BT = ctx.saved_tensors
        grad_logits_BTV = torch.zeros_like(logits_BTV)
        for positions, predicted, scaled_btV in _scaled_chunks(logits_BTV, ctx.temperature):
            probs_btV = scaled_btV.softmax(-1)
            # entr(p) = -p log p is 0 at p = 0, where -p * log p would be NaN.
            grad_btV = torch.special.entr(probs_btV).sub_(probs_btV.mul_(entropy_BT[predicted][..., None]))
            grad_logits_BTV[positions] = grad_btV.mul_(grad_BT[predicted][..., None] / ctx.temperature)
        return grad_logits_BTV, None


def _scaled_chunks(logits_BTV: Tensor, temperature: float) -> Iterator[tuple[Slices, Slices, Tensor]]:
    """Yields (slices of the logits, slices of the predicted tokens, logits [b, t, V] divided by the temperature)."""
    for positions, predicted in chunks(logits_BTV.shape, _CHUNK_ELEMENTS):
        logits_btV = logits_BTV[positions].to(_result_dtype(logits_BTV))
        yield positions, predicted, logits_btV if temperature == 1 else logits_btV / temperature


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check(logits: Tensor, temperature: float) -> None:
    if logits.dim() != 3:
        raise ValueError(f"logits have shape {list(logits.shape)}, but must be [B, T, V]")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but must be above 0")
