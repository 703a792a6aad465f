"""Computes the exact KL divergence over the vocabulary from the logits of two models.

Shape suffixes: B rows, T token positions, V vocabulary; lower case for a chunk of them.

Work is done in float32 (float64 stays) on a few positions at a time, so beside the logits and their gradient no tensor
of the size of the logits exists in either pass.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowrl.algorithms.logprobs import Context, chunks

_CHUNK_ELEMENTS = 2**22
"""Maximum logits per chunk: 16 MiB in float32; a single position may exceed it."""


def exact_kl(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns KL(policy || reference) in nats of each token's distribution.

        KL = sum_v p_v (log p_v - log q_v),     p = softmax(logits / temperature),  q that of ref_logits

    Arguments:
        logits: [B, T, V], the policy's output at each position, of any float dtype; -inf excludes a token.
        ref_logits: [B, T, V], the reference's. For KL(reference || policy) exchange the two.
        temperature: > 0, that of the rollout, for both.
    Returns: [B, T] in at least float32, differentiable (once) in both logits; column t is read from the logits at
        t - 1, which are those that choose token t, and column 0 is 0. Infinite where the policy gives weight to a token
        that the reference excludes. Where no gradient comes in none goes out, whatever the logits hold, so mask the
        result before it is reduced.
    Raises: ValueError on logits that are not [B, T, V] or of different shapes, or a temperature that is not above 0.

    Kullback and Leibler 1951, section 2, https://doi.org/10.1214/aoms/1177729694. Summed over a row's tokens it is an
    unbiased estimate of the divergence of whole rows, with less variance than from the sampled tokens alone. Deviation:
    as a loss, its gradient leaves out that earlier tokens decide at which later positions the policies are compared.
    """
    if logits.dim() != 3 or logits.shape != ref_logits.shape:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and ref_logits {list(ref_logits.shape)}, both must be [B, T, V]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, it must be above 0")
    return _ExactKl.apply(logits, ref_logits, temperature)


class _ExactKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_BTV: Tensor, ref_logits_BTV: Tensor, temperature: float) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(logits_BTV.dtype, ref_logits_BTV.dtype), torch.float32)
        kl_BT = logits_BTV.new_zeros(logits_BTV.shape[:2], dtype=dtype)
        for choosing, chosen in chunks(logits_BTV.shape, _CHUNK_ELEMENTS):
            probs_btV, gaps_btV = _probs_and_gaps(logits_BTV[choosing], ref_logits_BTV[choosing], dtype, temperature)
            kl_BT[chosen] = probs_btV.mul_(gaps_btV).sum(-1)
        ctx.save_for_backward(logits_BTV, ref_logits_BTV, kl_BT)
        ctx.temperature = temperature
        return kl_BT

    # The decorator hides the signature from the type checker.
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_BT: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d KL / d z_u = p_u (log p_u - log q_u - KL); for the reference's logits it is q_u - p_u."""
        logits_BTV, ref_logits_BTV, kl_BT = ctx.saved_tensors
        wanted, ref_wanted, _ = ctx.needs_input_grad
        grad_logits_BTV = torch.zeros_like(logits_BTV) if wanted else None
        grad_ref_logits_BTV = torch.zeros_like(ref_logits_BTV) if ref_wanted else None
        for choosing, chosen in chunks(logits_BTV.shape, _CHUNK_ELEMENTS):
            ref_logits_btV = ref_logits_BTV[choosing]
            probs_btV, gaps_btV = _probs_and_gaps(logits_BTV[choosing], ref_logits_btV, kl_BT.dtype, ctx.temperature)
            grad_bt1 = grad_BT[chosen][..., None] / ctx.temperature
            unused_bt1 = grad_bt1 == 0
            if grad_ref_logits_BTV is not None:
                ref_probs_btV = ref_logits_btV.to(kl_BT.dtype).div(ctx.temperature).softmax(-1)
                grad_btV = ref_probs_btV.sub_(probs_btV).mul_(grad_bt1)
                grad_ref_logits_BTV[choosing] = grad_btV.masked_fill_(unused_bt1, 0).to(ref_logits_BTV.dtype)
            if grad_logits_BTV is not None:
                grad_btV = gaps_btV.sub_(kl_BT[chosen][..., None]).mul_(probs_btV).mul_(grad_bt1)
                grad_logits_BTV[choosing] = grad_btV.masked_fill_(unused_bt1, 0).to(logits_BTV.dtype)
        return grad_logits_BTV, grad_ref_logits_BTV, None


def _probs_and_gaps(
    logits_btV: Tensor, ref_logits_btV: Tensor, dtype: torch.dtype, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns p, and log p - log q where p > 0, else 0."""
    logprobs_btV = logits_btV.to(dtype).div(temperature).log_softmax(-1)
    probs_btV = logprobs_btV.exp()
    gaps_btV = logprobs_btV.sub_(ref_logits_btV.to(dtype).div(temperature).log_softmax(-1))
    # What has no weight adds nothing, also where both models exclude it and the gap is inf - inf.
    return probs_btV, gaps_btV.masked_fill_(probs_btV == 0, 0)
