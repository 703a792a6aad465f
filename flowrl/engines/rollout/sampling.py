"""Samples tokens as a pure function of the logits and counter-based random numbers.

Shape suffixes: B rows, V vocabulary.

Each random number is a hash of (seed, prompt id, sample index, token position). A row therefore gets the same random
numbers on any rank and in any batch.
"""

import math

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**22
"""Maximum number of probabilities per chunk (32 MiB in float64). A chunk has at least one row."""


def row_keys(seed: int, prompt_id_B: Tensor, sample_B: Tensor) -> Tensor:
    """Returns the random-number key of each row, int64 [B].

    Args:
        seed: any integer. Only its low 64 bits are used.
        prompt_id_B: int64 [B], id of each row's prompt.
        sample_B: int64 [B], index of each row among the samples of its prompt.
    """
    seed_B = torch.full_like(prompt_id_B, _signed(seed))
    return _mix(_mix(_mix(seed_B) ^ prompt_id_B) ^ sample_B)


def segment_key(key: int, num_response_tokens: int) -> int:
    """Returns the seed (int64) of the random-number generator that an engine creates for the request of a segment.

    The first segment has the seed `key`. The seed of a later segment also depends on the number of earlier response
    tokens, so that the segments of a response get different random numbers.
    """
    if num_response_tokens == 0:
        return key
    return int(_mix(torch.tensor(_signed(key + num_response_tokens * _GOLDEN))))


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Returns one uniform random number per row and position, in float64 and [0, 1).

    Args:
        keys_B: int64 [B], from `row_keys`.
        positions_B: int64 [B] or [..., B], position of the token to sample, counted from the start of the prompt.
    """
    bits_B = _mix(keys_B + positions_B * _GOLDEN)
    return _shift_right(bits_B, 11).double() * 2.0**-53


def sample_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Samples one token per row by inverting the cumulative distribution over the vocabulary.

    Args:
        logits_BV: [B, V] of any float dtype.
        uniforms_B: float64 [B] in [0, 1). Ignored at temperature 0.
        temperature: >= 0, divisor of the logits. 0 selects the most likely token.
        top_k: number of most likely tokens to keep, plus ties. 0 keeps all tokens.
        top_p: in (0, 1], total probability of the most likely tokens to keep. Ties are ordered by token id.
    Returns: a tuple (tokens int64 [B], logprobs float32 or float64 [B]). Log-probabilities refer to the renormalized
        distribution after temperature, top-k and top-p. At temperature 0, they refer to the unscaled logits.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits_BV.shape[1])
    if logits_BV.shape[0] <= rows:
        return _sample(logits_BV, uniforms_B, temperature, top_k, top_p)
    chunks = zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    sampled = [_sample(logits_bV, uniforms_b, temperature, top_k, top_p) for logits_bV, uniforms_b in chunks]
    return torch.cat([tokens for tokens, _ in sampled]), torch.cat([logprobs for _, logprobs in sampled])


def _sample(
    logits_BV: Tensor, uniforms_B: Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, _logprobs(logits_BV, tokens_B)
    if temperature != 1:
        logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(top_k, -1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -math.inf)
    if top_p < 1:
        logits_BV = _keep_top_p(logits_BV, top_p)
    cumulative_BV = _cumulative(logits_BV.softmax(-1))
    total_B1 = cumulative_BV[:, -1:].contiguous()
    tokens_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * total_B1, right=True)
    # The product can round up to the total, which would select a token of probability 0.
    tokens_B1 = torch.minimum(tokens_B1, torch.searchsorted(cumulative_BV, total_B1))
    tokens_B = tokens_B1.squeeze(1)
    return tokens_B, _logprobs(logits_BV, tokens_B)


def _keep_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    sorted_BV, order_BV = torch.sort(logits_BV.softmax(-1), dim=-1, descending=True, stable=True)
    likelier_BV = _cumulative(sorted_BV) - sorted_BV
    dropped_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(1, order_BV, likelier_BV >= top_p)
    return logits_BV.masked_fill(dropped_BV, -math.inf)


def _cumulative(probabilities_BV: Tensor) -> Tensor:
    """Returns cumulative sums in float64. The rounding error of float32 exceeds the probability of a rare token."""
    # In deterministic mode, torch has no cumulative sum on GPUs.
    device = "cpu" if torch.are_deterministic_algorithms_enabled() else probabilities_BV.device
    return probabilities_BV.to(device).cumsum(-1, dtype=torch.float64).to(probabilities_BV.device)


def _logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return logits_BV.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1)


def _signed(bits: int) -> int:
    """Returns the low 64 bits of an integer as a signed value."""
    return (bits + 2**63) % 2**64 - 2**63


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts int64 values right logically. torch's own right shift is arithmetic."""
    return (bits >> count) & (2 ** (64 - count) - 1)


# Constants of SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 16.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """Applies the SplitMix64 finalizer to int64 values."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)
