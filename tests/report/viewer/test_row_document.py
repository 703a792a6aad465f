"""The text of one row, and the values of a token."""

import pytest
from rich.cells import cell_len

from flowrl.report.viewer.row_document import EMPTY_TOKEN, Piece, describe_token, make_document, words, wrap_pieces
from tests.report.viewer.saved_rows import TOKENS, make_row

PARTS = [
    {"kind": "policy", "start": 0, "end": 2, "text": "a"},
    {"kind": "environment", "start": 2, "end": 3, "text": "é"},
    {"kind": "policy", "start": 3, "end": 4, "text": " b"},
]


def text(**values: object) -> str:
    return "".join(piece.text for piece in make_document(make_row(**values)))  # pyright: ignore[reportArgumentType]


def test_a_document_has_values_texts_and_failures() -> None:
    shown = text(
        rewards={"format": None, "task": 0.125},
        reward_failures={"format": "too\nlate"},
        answer=4,
        version=3,
        set="hard",
    )
    for part in ("score 0.500", "version 3", "set hard", "format null", "task 0.125", "too late", "0+1=", "two"):
        assert part in shown
    assert "\nanswer\n4\n" in shown and "staleness" not in shown


def test_tokens_are_pieces_with_an_index() -> None:
    pieces = [piece for piece in make_document(make_row(tokens=TOKENS)) if piece.token is not None]
    assert [(piece.text, piece.token) for piece in pieces] == [("a", 0), (EMPTY_TOKEN, 1), ("é", 2), (" b", 3)]


def test_segments_have_headings_and_styles() -> None:
    pieces = make_document(make_row(tokens=TOKENS, segments=PARTS))
    assert [piece.style for piece in pieces if piece.token is not None] == ["text", "text", "environment", "text"]
    without_tokens = make_document(make_row(segments=PARTS))
    assert [piece.text for piece in without_tokens if piece.style == "environment"] == ["é"]
    for document in (pieces, without_tokens):
        assert sum("[environment" in piece.text for piece in document) == 1


def test_a_response_of_unknown_length_is_shown() -> None:
    assert text(response_length=None).endswith("\nresponse\ntwo")


def test_values_of_a_token() -> None:
    row = make_row(tokens=TOKENS)
    assert describe_token(row, 0, "ratios").startswith("1/4  ratio 1.6487  logprob -1  rollout logprob -1.5")
    assert describe_token(row, 2) == "3/4  environment  id 7"


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
