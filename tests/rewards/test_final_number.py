import pytest

from flowrl.rewards.final_number import extract_answer, score


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("7 and 5 make 12.", "#### 12", 1.0),
        ("12, no, 13", "12", 0.0),
        ("It costs $1,250.50", "1250.5", 1.0),
        ("-3", "3", 0.0),
        ("none", "3", 0.0),
    ],
)
def test_the_last_number_is_scored(response: str, answer: str, expected: float) -> None:
    assert score("How many?", response, answer) == expected


def test_an_answer_without_a_number_is_rejected() -> None:
    with pytest.raises(ValueError, match="three"):
        score("How many?", "3", "three")


@pytest.mark.parametrize(("response", "answer"), [("2 and 1,000", "1000.0"), ("-3.50", "-3.5"), ("none", None)])
def test_the_last_number_is_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
