"""Pieces of text are wrapped into lines of a terminal."""

import pytest
from rich.cells import cell_len

from flowrl.report.viewer.text_lines import Piece, words, wrap_pieces


def texts(pieces: list[Piece], width: int) -> list[str]:
    return ["".join(piece.text for piece in line) for line in wrap_pieces(pieces, width)]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("one two three", 8, ["one two ", "three"]),
        ("one two", 7, ["one two"]),
        ("abcdefghij k", 4, ["abcd", "efgh", "ij k"]),
        ("a\n\nb", 9, ["a", "", "b"]),
        ("数学数学", 4, ["数学", "数学"]),
        ("a\tb", 20, ["a    b"]),
        ("\x1b[2Jx\u202e", 30, ["\\x1b[2Jx\\u202e"]),
        ("", 10, [""]),
        ("one two  \nx", 7, ["one two  ", "x"]),  # white space at the end of a line is not wrapped
    ],
)
def test_words_are_wrapped(text: str, width: int, expected: list[str]) -> None:
    assert texts(list(words(text, "text")), width) == expected


def test_tokens_keep_their_index_in_all_lines() -> None:
    lines = wrap_pieces([Piece("ab", "text", 0), Piece("cdefgh", "text", 1), Piece("\n", "text", 2)], 5)
    assert [[(piece.text, piece.token) for piece in line] for line in lines] == [
        [("ab", 0)],
        [("cdefg", 1)],
        [("h", 1), ("↵", 2)],
        [],
    ]


def test_no_line_is_wider_than_the_view() -> None:
    pieces = [Piece(f" w{i}" * (1 + i % 7), "text", i) for i in range(500)]
    lines = texts(pieces, 20)
    assert max(cell_len(line.rstrip()) for line in lines) <= 20
    assert "".join(lines) == "".join(piece.text for piece in pieces)
