"""Output of the programs: the console, and text without control characters."""

import os
import re
import sys
from typing import TYPE_CHECKING

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
