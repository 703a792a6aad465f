"""The text of one row in the viewer: its values, prompt, answer and response, and their lines in the terminal."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

from flowrl.data.console import printable
from flowrl.report.rollout_log import Row
from flowrl.report.token_values import segments_of

LINE_BREAK = "↵"
"""Character that is shown for a line break in a token, so that the token is visible."""


class Piece(NamedTuple):
    """A part of a text with one style."""

    text: str
    style: str
    """Name of a style in `text_view`."""
    token: int | None = None
    """Index of the response token; None for other text."""


Line = list[Piece]


def words(text: str, style: str) -> Iterator[Piece]:
    """Yields the words of a text as pieces, each with the line breaks before its word and the spaces after it."""
    yield from (Piece(word, style) for word in re.findall(r"\s*\S+[^\S\n]*|\s+", text))


def wrap_pieces(pieces: Iterable[Piece], width: int) -> list[Line]:
    """Returns the lines of pieces, each at most `width` cells wide.

    A line ends at a line break or before a piece that does not fit. Pieces that are wider than a line are split.
    Control characters are escaped.
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


EMPTY_TOKEN = "▯"
"""Text for a token that contains only some bytes of a character."""

_VALUES = {
    "score": ".3f",
    "advantage": ".3f",
    "response_length": "d",
    "environment_length": "d",
    "finish_reason": "s",
    "version": "d",
    "newest_version": "d",
    "staleness": "d",
    "prompt_id": "d",
    "sample": "d",
    "set": "s",
}
"""Column that is shown in the first lines -> format of its values."""


def make_document(row: Row) -> list[Piece]:
    """Returns the pieces of a row: values, rewards, failures, prompt, answer and response."""
    return [*_values(row), *_texts(row), *_response(row)]


def _values(row: Row) -> Iterator[Piece]:
    values = {name: format(row[name], form) for name, form in _VALUES.items() if row[name] is not None}
    if row["newest_version"] == row["version"]:
        values.pop("newest_version", None)
    if not row["environment_length"]:
        values.pop("environment_length", None)
    yield from _pairs(values)
    for label, scores in (("rewards", row["rewards"]), ("other scores", row["other_scores"])):
        if scores:
            yield Piece(f"{label}: ", "label")
            yield from _pairs({name: "null" if value is None else f"{value:.4g}" for name, value in scores.items()})
    for name, message in (row["reward_failures"] or {}).items():
        yield Piece(f"failed reward {name}: ", "failed")
        yield from words(f"{' '.join(message.split())}\n", "text")


def _pairs(values: dict[str, str]) -> Iterator[Piece]:
    for name, value in values.items():
        yield Piece(f"{name.replace('_', ' ')} {value}   ", "value")
    yield Piece("\n", "text")


def _texts(row: Row) -> Iterator[Piece]:
    for name in ("prompt", "answer"):
        if row[name] is not None:
            yield Piece(f"\n{name}\n", "label")
            yield from words(f"{row[name]}\n", "text")


def _response(row: Row) -> Iterator[Piece]:
    segments, tokens = segments_of(row), row["tokens"]
    yield Piece("\nresponse\n", "label")
    if not segments:
        yield from words(str(row["response"]), "text")
    for segment in segments:
        if len(segments) > 1:
            start = "\n" if segment["start"] else ""
            yield Piece(f"{start}[{segment['kind']}, tokens {segment['start']} to {segment['end'] - 1}]\n", "label")
        style = "text" if segment["kind"] == "policy" else "environment"
        if tokens is None:
            yield from words(segment["text"], style)
            continue
        for index in range(segment["start"], min(segment["end"], len(tokens["text"]))):
            yield Piece(tokens["text"][index] or EMPTY_TOKEN, style, index)


def describe_token(row: Row, index: int, first: str | None = None) -> str:
    """Returns the values of a token in one line. `first` names the list of the column `tokens` whose value precedes the
    others.
    """
    lists = row["tokens"]
    names = sorted((name for name in lists if name not in ("ids", "text", "mask")), key=lambda name: name != first)
    present = [(name, lists[name][index]) for name in names if lists[name][index] is not None]
    values = [f"{_SINGULAR.get(name, name)} {value:.5g}" for name, value in present]
    producer = [] if lists["mask"][index] else ["environment"]
    return "  ".join([f"{index + 1}/{len(lists['ids'])}", *producer, *values, f"id {lists['ids'][index]}"])


_SINGULAR = {
    "logprobs": "logprob",
    "rollout_logprobs": "rollout logprob",
    "ref_logprobs": "ref logprob",
    "values": "value",
    "advantages": "advantage",
    "ratios": "ratio",
    "versions": "version",
}
"""List of the column `tokens` -> name of one value."""
