"""The text of one row, and the values of a token."""

from flowrl.report.viewer.row_document import EMPTY_TOKEN, describe_token, make_document
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
