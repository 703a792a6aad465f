"""Output of the programs: the console, foreign text without control characters, log lines, and rounded numbers."""

import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_FILE_COLUMNS = 10_000

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_COLOR = re.compile(r"\x1b\[[0-9;]*m")

_LINE_START = re.compile(r"\n(?=\S)")


def make_console(*, stderr: bool = False) -> "Console":
    """Returns a console of standard output or standard error, which prints all text as `printable` returns it.

    The console wraps lines on a terminal, but not in a file, because users search files. The environment variable
    COLUMNS sets the width of both.
    """
    from rich.console import Console  # noqa: PLC0415 (commands without tables start without it)
    from rich.segment import Segment  # noqa: PLC0415

    class PrintableConsole(Console):
        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            for segment in super().render(renderable, options):
                is_foreign = segment.control is None  # otherwise, rich moves the cursor
                yield Segment(printable(segment.text), segment.style) if is_foreign else segment

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _FILE_COLUMNS
    return PrintableConsole(stderr=stderr, width=width)


def write_printable(text: str, stream: TextIO | None = None) -> None:
    """Writes text as `printable` returns it to a stream (default: standard output).

    Characters that the encoding of the stream lacks are written as escapes.
    """
    output: TextIO = sys.stdout if stream is None else stream
    encoding = output.encoding or "utf-8"
    output.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """Replaces characters that change the output of a terminal by their escapes, except line breaks and tabs.

    These are control characters, unpaired surrogates, line separators and characters that change the direction of text.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def indent_lines(text: str) -> str:
    """Indents the lines after the first, so that foreign text cannot begin a line like one of the program."""
    return _LINE_START.sub("\n  ", text)


def shorten(text: str, limit: int) -> str:
    """Returns printable text without colors. If the text has more than `limit` characters, its middle is omitted."""
    text = printable(_COLOR.sub("", text))
    if len(text) <= limit:
        return text
    kept = limit // 2 - 30  # leaves room for the count, so that a shortened text is not shortened again
    return f"{text[:kept]} ... ({len(text) - 2 * kept} characters) ... {text[-kept:]}"


class LogFormatter(logging.Formatter):
    """Formats records as `printable` returns them, without colors. A format may contain `%(level)s`, such as error."""

    def format(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        return printable(_COLOR.sub("", super().format(record)))


_MAX_DIGITS = 17
"""Number of significant digits that distinguishes all floats."""


def round_pair(first: Any, second: Any, *, min_digits: int = 4) -> tuple[Any, Any]:  # Any: values of JSON
    """Rounds the floats of two values to the fewest significant digits that distinguish them, but at least
    `min_digits`.

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
    """Rounds a float to this number of significant digits. Floats in lists and objects are rounded, too.

    All digits before the decimal point are kept, even if there are more. Other values are unchanged.
    """
    if isinstance(value, list):
        return [_round(item, digits) for item in value]
    if isinstance(value, Mapping):
        return {key: _round(item, digits) for key, item in value.items()}
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.{max(digits, math.ceil(math.log10(abs(value) + 1)))}g}")
