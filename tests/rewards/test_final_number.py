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
        ("it is .5", "5", 0.0),
        ("it is .5", "0.5", 1.0),
        ("so \u22123", "3", 0.0),
        ("so \u22123", "-3", 1.0),
        ("12", 12, 1.0),
        ("0.00001", 1e-5, 1.0),
        ("1234567890123456789012", "1234567890123456789012", 1.0),
        ("1234567890123456789013", "1234567890123456789012", 0.0),
        ("9" * 400, "8" * 400, 0.0),
    ],
)
def test_the_last_number_is_scored(response: str, answer: object, expected: float) -> None:
    assert score("How many?", response, answer) == expected


@pytest.mark.parametrize("answer", ["three", "7 and 5 make 12"])
def test_an_answer_that_is_not_one_number_is_rejected(answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        score("How many?", "3", answer)


@pytest.mark.parametrize(("response", "answer"), [("2 and 1,000", "1000"), ("-3.50", "-3.5"), ("none", None)])
def test_the_last_number_is_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
