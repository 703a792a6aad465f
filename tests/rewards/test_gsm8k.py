import pytest

from flowrl.rewards.gsm8k import extract_answer, score
from tests.rewards.test_math import rows


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("9 * 2 = 18\n#### 18", "It is 9 * 2.\n#### 18", 1.0),
        ("#### 18", "18", 1.0),
        ("#### 18", 18, 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### $1,234.50 per day", "1234.5", 1.0),
        ("#### -3", "3", 0.0),
        ("#### -3", "-3", 1.0),
        ("#### 17 #### 18", "18", 1.0),
        ("#### 18 #### 17", "18", 0.0),
        ("#### 17 or 18", "18", 0.0),
        ("####", "18", 0.0),
        ("The answer is 18.", "18", 0.0),
        ("", "18", 0.0),
        ("#### " + "1" * 100_000, "18", 0.0),
        ("#### \u22123", "3", 0.0),
        ("#### \u22123", "-3", 1.0),
        ("#### 3", "\u22123", 0.0),
        ("#### - 3", "3", 0.0),
        ("#### - 3", "-3", 1.0),
        ("#### $- 3", "3", 0.0),
        ("It is 2.\n####\n- 3", "-3", 1.0),
        ("#### -5", 0.00001, 0.0),
        ("#### 0.00001", 0.00001, 1.0),
        ("#### 16", 2e16, 0.0),
        ("#### 20000000000000000", 2e16, 1.0),
        ("#### 4", "3/4", 0.0),
        ("#### 3/4", "3/4", 1.0),
        ("#### 0.75", "3/4", 1.0),
        ("#### 3", "1e3", 0.0),
        ("#### 1000", "1e3", 1.0),
        ("#### 1234567890123456789013", "1234567890123456789012", 0.0),
    ],
)
def test_the_number_after_the_marker_is_compared(response: str, answer: object, expected: float) -> None:
    assert score(response, answer) == expected


def test_flexible_reads_the_last_number_of_a_response_without_a_marker() -> None:
    assert score("9 * 2 makes 18 eggs.", "#### 18", flexible=True) == 1.0
    assert score("18 is not 17.", "#### 18", flexible=True) == 0.0
    assert score("18, so #### 17", "#### 18", flexible=True) == 0.0
    assert score("1 " * 50_000, "#### 18", flexible=True) == 0.0


@pytest.mark.parametrize("answer", ["", "#### none", None, "17 or 18", "#### 17 or 18"])
def test_an_answer_that_is_not_one_number_is_rejected(answer: object) -> None:
    with pytest.raises(ValueError, match="answer"):
        score("#### 3", answer)


@pytest.mark.parametrize("split", ["train", "test"])
def test_all_solutions_of_gsm8k_are_correct(split: str) -> None:
    assert [row["answer"] for row in rows(split) if score(row["answer"], row["answer"]) != 1.0] == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1 + 1 = 2\n#### 2", "2"),
        ("#### $1,200.50 in total", "1200.5"),
        ("#### 1200.500", "1200.5"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### 1e3", "1000"),
        ("It is 2.", None),
        ("#### none", None),
    ],
)
def test_equal_numbers_are_one_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
