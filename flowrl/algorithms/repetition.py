"""Repeated n-grams in responses, as a measure of degenerate text."""

import torch
from torch import Tensor

_MULTIPLIER = 6364136223846793005
"""Odd multiplier of a 64-bit hash."""


def repeated_ngrams(ids: Tensor, mask: Tensor, *, size: int = 4) -> tuple[int, int]:
    """Returns the number of repeated n-grams and the number of all n-grams.

    An n-gram is repeated if it occurs earlier in the same row. It consists of `size` adjacent tokens of the mask.

    Args:
        ids: int64 [B, T], token ids.
        mask: bool [B, T], true for tokens that count.
        size: > 0, number of tokens of an n-gram.
    """
    num_positions = ids.shape[1] - size + 1
    if num_positions <= 0 or not len(ids):
        return 0, 0
    # The hash of a row number and an n-gram. Two different ones are equal with a probability of about 2^-64.
    keys_BP = torch.arange(1, len(ids) + 1).mul(_MULTIPLIER)[:, None].expand(-1, num_positions)
    valid_BP = torch.ones_like(keys_BP, dtype=torch.bool)
    for offset in range(size):
        positions = slice(offset, offset + num_positions)
        keys_BP = (keys_BP + ids[:, positions] + 1) * _MULTIPLIER
        valid_BP = valid_BP & mask[:, positions]
    keys_N = keys_BP[valid_BP]
    return len(keys_N) - len(torch.unique(keys_N)), len(keys_N)
