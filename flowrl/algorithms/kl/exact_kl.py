"""Computes the exact KL divergence over the vocabulary from the logits of two models.

Shape suffixes: B rows, T token positions, V vocabulary. Lower case denotes a chunk.

Chunks of positions are computed in float32; float64 inputs stay float64. Only the logits and their gradients have the
full shape [B, T, V].
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowrl.algorithms.logprobs import Context, chunks

_CHUNK_ELEMENTS = 2**22
"""Maximum number of logits per chunk (16 MiB in float32). A chunk has at least one position, even if it exceeds
this.
"""


def exact_kl(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns KL(policy || reference) in nats of each token's distribution.

        KL = sum_v p_v (log p_v - log q_v),     p, q = softmax(logits / temperature), softmax(ref_logits / temperature)

    Args:
        logits: [B, T, V], output of the policy at each position, of any float dtype; -inf excludes a token.
        ref_logits: [B, T, V], output of the reference. Swap the two arguments for KL(reference || policy).
        temperature: > 0, sampling temperature of the rollout.
    Returns: [B, T] in at least float32, differentiable once in both logits. Column t belongs to token t, which the
        logits at t - 1 predict. Column 0 is 0. The result is infinite if the reference excludes a token that the policy
        does not exclude. Mask the result before reducing it: positions with an incoming gradient of 0 then have
        gradient 0, even for non-finite logits.
    Raises: ValueError for shapes that differ or are not [B, T, V], or a temperature <= 0.

    Kullback and Leibler 1951, section 2, https://doi.org/10.1214/aoms/1177729694. The sum over a row is an unbiased
    estimate of the KL of sequences. Its variance is lower than that of estimates from sampled tokens. As a loss, its
    gradient ignores the effect of earlier tokens on later states.
    """
    if logits.dim() != 3 or logits.shape != ref_logits.shape:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and ref_logits {list(ref_logits.shape)}, both must be [B, T, V]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but must be above 0")
    return _ExactKl.apply(logits, ref_logits, temperature)


class _ExactKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_BTV: Tensor, ref_logits_BTV: Tensor, temperature: float) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(logits_BTV.dtype, ref_logits_BTV.dtype), torch.float32)
        kl_BT = logits_BTV.new_zeros(logits_BTV.shape[:2], dtype=dtype)
        for positions, predicted in chunks(logits_BTV.shape, _CHUNK_ELEMENTS):
            probs_btV, gaps_btV = _probs_and_gaps(logits_BTV[positions], ref_logits_BTV[positions], dtype, temperature)
            kl_BT[predicted] = probs_btV.mul_(gaps_btV).sum(-1)
        ctx.save_for_backward(logits_BTV, ref_logits_BTV, kl_BT)
        ctx.temperature = temperature
        return kl_BT

    # The decorator hides the signature from the type checker.
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_BT: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients: p_u (log p_u - log q_u - KL) for the policy's logits, and q_u - p_u for the
        reference's logits.
        """
        logits_BTV, ref_logits_BTV, kl_BT = ctx.saved_tensors
        needs_grad, ref_needs_grad, _ = ctx.needs_input_grad
        grad_logits_BTV = torch.zeros_like(logits_BTV) if needs_grad else None
        grad_ref_logits_BTV = torch.zeros_like(ref_logits_BTV) if ref_needs_grad else None
        for positions, predicted in chunks(logits_BTV.shape, _CHUNK_ELEMENTS):
            ref_logits_btV = ref_logits_BTV[positions]
            probs_btV, gaps_btV = _probs_and_gaps(logits_BTV[positions], ref_logits_btV, kl_BT.dtype, ctx.temperature)
            grad_bt1 = grad_BT[predicted][..., None] / ctx.temperature
            unused_bt1 = grad_bt1 == 0
            if grad_ref_logits_BTV is not None:
                ref_probs_btV = ref_logits_btV.to(kl_BT.dtype).div(ctx.temperature).softmax(-1)
                grad_btV = ref_probs_btV.sub_(probs_btV).mul_(grad_bt1)
                grad_ref_logits_BTV[positions] = grad_btV.masked_fill_(unused_bt1, 0).to(ref_logits_BTV.dtype)
            if grad_logits_BTV is not None:
                grad_btV = gaps_btV.sub_(kl_BT[predicted][..., None]).mul_(probs_btV).mul_(grad_bt1)
                grad_logits_BTV[positions] = grad_btV.masked_fill_(unused_bt1, 0).to(logits_BTV.dtype)
        return grad_logits_BTV, grad_ref_logits_BTV, None


def _probs_and_gaps(
    logits_btV: Tensor, ref_logits_btV: Tensor, dtype: torch.dtype, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns p and log p - log q, the latter set to 0 where p = 0."""
    logprobs_btV = logits_btV.to(dtype).div(temperature).log_softmax(-1)
    probs_btV = logprobs_btV.exp()
    gaps_btV = logprobs_btV.sub_(ref_logits_btV.to(dtype).div(temperature).log_softmax(-1))
    # Tokens of probability 0 contribute 0, also where both models exclude the token and the gap is inf - inf.
    return probs_btV, gaps_btV.masked_fill_(probs_btV == 0, 0)
