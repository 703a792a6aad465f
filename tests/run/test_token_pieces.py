"""The text of each token, for byte-level tokenizers, and the rounding of saved values."""

import math
from collections.abc import Sequence
from itertools import accumulate

import pytest

from flowrl.run.rollout_rows import round_values, split_text


def decode_bytes(ids: Sequence[int]) -> str:
    """Decodes a byte-level tokenizer with one token per byte."""
    return bytes(ids).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """Decodes like a SentencePiece tokenizer: each token is a word after a space, except at the start of a text."""
    return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"ab", ["a", "b"]),
        ("é".encode(), ["", "é"]),
        ("a€b".encode(), ["a", "", "", "€", "b"]),
        ("😀".encode(), ["", "", "", "😀"]),
        ("a€".encode()[:-1], ["a", "", "\ufffd"]),  # the response was truncated within a character
        (b"\xffa", ["", "\ufffda"]),
        (b"", []),
    ],
)
def test_a_character_of_several_tokens_is_in_its_last_token(data: bytes, expected: list[str]) -> None:
    assert split_text(list(data), decode_bytes) == expected


@pytest.mark.parametrize(
    "data",
    [
        "Σ x²=π ≈ 3.14 数学 😀".encode() * 9,
        b"\xff" * 50 + "é".encode() + b"x",
        "é".encode() + b"\xc3" * 37,
        bytes(range(256)) * 2,
        b"a" * 15 + "é".encode() * 20,
    ],
)
def test_the_pieces_are_the_text_of_all_tokens(data: bytes) -> None:
    pieces = split_text(list(data), decode_bytes)
    assert "".join(pieces) == decode_bytes(list(data))
    assert len(pieces) == len(data)
    # No piece is in the wrong order: the text up to a token never exceeds that of its bytes.
    whole = data.decode("utf-8", "replace")
    assert all(whole.startswith(text) for text in accumulate(pieces))


def test_the_space_before_a_word_belongs_to_its_token() -> None:
    assert split_text(range(40), decode_words) == ["w0", *(f" w{i}" for i in range(1, 40))]


def test_values_are_rounded_to_five_digits() -> None:
    values = [-0.000123456, 1.00034, 123456.7, math.nan, math.inf, 0.5]
    assert round_values(values, [True] * 5 + [False]) == [-0.00012346, 1.0003, 123460.0, None, None, None]
