import pytest

from flowrl.rewards.text import has_tags, language, length, matches

GOOD = "<think>1 + 1</think>\n<answer>2</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        ("<answer>2</answer><think>1 + 1</think>", 0.0),
        ("<think>1 + 1</think>", 0.0),
        ("<think>1 + 1<answer>2</answer></think>", 0.0),
        ("<think>1 + 1</think><answer>2", 0.0),
        ("<think> </think><answer>2</answer>", 0.0),
        (f"{GOOD}<answer>3</answer>", 0.0),
        (f"So: {GOOD}", 0.0),
        ("<think>1<answer>", 0.0),
        ("", 0.0),
        ("<think>" * 20_000, 0.0),
    ],
)
def test_tags_occur_once_in_order(response: str, expected: float) -> None:
    assert has_tags(response) == expected


def test_text_outside_of_the_tags_is_allowed_if_not_strict() -> None:
    assert has_tags(f"So: {GOOD} Bye.", strict=False) == 1.0
    assert has_tags(f"So: {GOOD}{GOOD}", strict=False) == 0.0


def test_tags_of_the_prompt_and_special_tokens_are_part_of_the_response() -> None:
    assert has_tags("1 + 1</think><answer>2</answer>", "<think>\n1 + 1</think><answer>2</answer>") == 1.0
    assert has_tags("1 + 12", GOOD) == 1.0
    assert has_tags("2</answer>", "<answer>\n2</answer>", tags=("answer",)) == 1.0
    assert has_tags("2", "<think>\n2") == 0.0


def test_other_tags_can_be_required() -> None:
    assert has_tags("<a.b>x</a.b>", tags=("a.b",)) == 1.0
    assert has_tags("<a-b>x</a-b>", tags=("a.b",)) == 0.0
    assert has_tags(GOOD, tags=("answer",), strict=False) == 1.0


def test_a_pattern_matches_the_complete_response() -> None:
    pattern = r"Answer: \d+"
    assert [matches(text, pattern=pattern) for text in ("Answer: 12", "Answer: 12.", " Answer: 12")] == [1, 0, 0]
    assert matches("a\nb", pattern="a.b") == 1.0
    assert matches("a" * 100_001, pattern="a*") == 0.0


def test_a_malformed_pattern_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(a"):
        matches("a", pattern="(a")


def test_length_counts_characters_words_or_tokens() -> None:
    text = "one two\nthree"
    assert [length(text, maximum=limit) for limit in (12, 13)] == [0, 1]
    assert [length(text, unit="words", minimum=limit) for limit in (3, 4)] == [1, 0]
    assert [length(text, [5, 6, 7, 8], unit="tokens", maximum=limit) for limit in (3, 4)] == [0, 1]
    assert length("") == 1.0


def test_length_falls_linearly_over_the_tolerance() -> None:
    scores = [length("x" * count, minimum=4, maximum=6, tolerance=4) for count in (0, 1, 3, 4, 6, 7, 9, 10, 20)]
    assert scores == [0, 0.25, 0.75, 1, 1, 0.75, 0.25, 0, 0]


def test_invalid_options_of_length_are_rejected() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        length("a", unit="tokens")
    with pytest.raises(ValueError, match="lines"):
        length("a", unit="lines")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="minimum 3"):
        length("a", minimum=3, maximum=2)


@pytest.mark.parametrize(
    ("text", "script", "expected"),
    [
        ("Hello, world 123!", "latin", 1.0),
        ("Straße, déjà", "latin", 1.0),
        ("привет", "cyrillic", 1.0),
        ("привет", "latin", 0.0),
        ("你好ab", "chinese", 0.5),
        ("こんにちは世界", "japanese", 1.0),
        ("こん世界", "chinese", 0.5),
        ("안녕하세요", "korean", 1.0),
        ("שלום", "hebrew", 1.0),
        ("नमस", "devanagari", 1.0),
        ("\uff21\uff22", "latin", 1.0),
        ("123 + 4 = ?", "latin", 0.0),
        ("", "latin", 0.0),
    ],
)
def test_language_is_the_share_of_letters_of_a_script(text: str, script: str, expected: float) -> None:
    assert language(text, script=script) == expected


def test_language_is_compared_with_a_threshold() -> None:
    assert [language("你好ab", script="chinese", threshold=share) for share in (0.5, 0.6)] == [1, 0]


def test_an_unknown_script_is_rejected() -> None:
    with pytest.raises(ValueError, match="klingon"):
        language("a", script="klingon")
