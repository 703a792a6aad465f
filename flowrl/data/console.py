"""Output of the programs: the console, text without control characters, and rounded numbers."""

import math
import os
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_FILE_COLUMNS = 10_000

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def make_console() -> "Console":
    """Returns a console of standard output. It wraps lines on a terminal, but not in a file, where they are searched.

    The environment variable COLUMNS sets the width of both.
    """
    from rich.console import Console  # noqa: PLC0415 (commands without tables start without it)

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=_FILE_COLUMNS)


def printable(text: str) -> str:
    """Replaces characters that change the output of a terminal by their escapes, except line breaks and tabs.

    These are control characters, unpaired surrogates, line separators and characters that change the direction of text.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_MAX_DIGITS = 17
"""Number of significant digits that distinguishes all floats."""


def round_pair(first: Any, second: Any, *, min_digits: int = 4) -> tuple[Any, Any]:  # Any: values of JSON
    """Rounds the floats of two values to the fewest significant digits, at least `min_digits`, that distinguish them.

    Floats in lists and objects are rounded in pairs. Digits before the decimal point are kept.
    """
    if isinstance(first, list) and isinstance(second, list):
        pairs = [round_pair(*pair, min_digits=min_digits) for pair in zip_longest(first, second)]
        return [one for one, _ in pairs][: len(first)], [other for _, other in pairs][: len(second)]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = {key: round_pair(first.get(key), second.get(key), min_digits=min_digits) for key in (*first, *second)}
        return {key: pairs[key][0] for key in first}, {key: pairs[key][1] for key in second}
    for digits in range(min_digits, _MAX_DIGITS):
        rounded = _round(first, digits), _round(second, digits)
        if rounded[0] != rounded[1]:
            return rounded
    return (first, second) if first != second else (_round(first, min_digits), _round(second, min_digits))


def _round(value: Any, digits: int) -> Any:  # Any: a value of JSON
    """Rounds a float to this number of significant digits, and also the floats in lists and objects.

    Digits before the decimal point are kept, even if they are more. Other values are unchanged.
    """
    if isinstance(value, list):
        return [_round(item, digits) for item in value]
    if isinstance(value, Mapping):
        return {key: _round(item, digits) for key, item in value.items()}
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.{max(digits, math.ceil(math.log10(abs(value) + 1)))}g}")
