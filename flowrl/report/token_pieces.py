"""Values of the column `tokens`: the decoded text of each token, and rounded numbers."""

import math
from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"
"""Character that a decoder returns for bytes that are not (yet) a character."""

_CONTEXT = 8
"""Number of earlier tokens that are decoded together with a token, because its text depends on them. A character of 4
bytes has at most 4 tokens.
"""

_MAX_PENDING = 8
"""Largest number of consecutive tokens without text, after which their bytes are not the beginning of a character."""

_NUM_DIGITS = 5
"""Number of significant digits of a saved value."""


def split_text(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the text of each token. The pieces, concatenated, are the text of all tokens.

    Byte-level tokenizers split a character into several tokens. The last one of them gets the character, and the others
    get an empty piece. Bytes that are no character become U+FFFD.

    Args:
        ids: token ids.
        decode: returns the text of token ids.
    """
    pieces: list[str] = []
    start = done = num_pending = 0  # `done`: number of characters of the tokens from `start` that `pieces` contain
    for i in range(len(ids)):
        text = decode(ids[start : i + 1])
        end = len(text) if i == len(ids) - 1 else len(text.rstrip(_REPLACEMENT))
        if num_pending == _MAX_PENDING:
            end = max(end, len(text) - 1)  # the last bytes may still be the beginning of a character
        pieces.append(text[done:end])
        num_pending = 0 if end > done else num_pending + 1
        done = max(done, end)
        if i + 1 - start >= 2 * _CONTEXT and not num_pending:
            num_missing = len(text) - done
            start = i + 1 - _CONTEXT
            done = len(decode(ids[start : i + 1])) - num_missing
    return pieces


def round_values(values: Iterable[float], is_present: Iterable[bool]) -> list[float | None]:
    """Rounds values to a few significant digits. Absent and infinite values and NaN become None."""
    return [
        float(f"{value:.{_NUM_DIGITS}g}") if present and math.isfinite(value) else None
        for value, present in zip(values, is_present, strict=True)
    ]
