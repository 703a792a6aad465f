"""Wraps pieces of text, such as tokens, into lines of a terminal."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

from flowrl.data.console import printable

LINE_BREAK = "↵"
"""Shown for a line break in a token, so that the token is visible."""


class Piece(NamedTuple):
    """A part of a text with one style."""

    text: str
    style: str
    """Name of a style in `text_view`."""
    token: int | None = None
    """Index of the response token, or None."""


Line = list[Piece]


def words(text: str, style: str) -> Iterator[Piece]:
    """Yields the words of a text as pieces, each with the white space after it."""
    yield from (Piece(word, style) for word in re.findall(r"\s*\S+[^\S\n]*|\s+", text))


def wrap_pieces(pieces: Iterable[Piece], width: int) -> list[Line]:
    """Returns the lines of pieces, each at most `width` cells wide.

    A line ends at a line break or before a piece that does not fit. Longer pieces are split. Control characters are
    escaped.
    """
    width = max(width, 4)
    lines: list[Line] = [[]]
    used = 0
    for piece in pieces:
        parts = printable(piece.text).replace("\t", "    ").split("\n")
        for i, part in enumerate(parts):
            if i:
                lines.append([])
                used = 0
            if piece.token is not None and i < len(parts) - 1:
                part += LINE_BREAK
            size = cell_len(part)
            if used and part.strip() and used + cell_len(part.rstrip()) > width:
                lines.append([])
                used = 0
            if size <= width:
                if part:
                    lines[-1].append(piece if part == piece.text else Piece(part, piece.style, piece.token))
                used += size
                continue
            chopped = chop_cells(part, width)
            lines[-1].append(Piece(chopped[0], piece.style, piece.token))
            lines += [[Piece(text, piece.style, piece.token)] for text in chopped[1:]]
            used = cell_len(chopped[-1])
    return lines
