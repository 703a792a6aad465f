"""Filter expressions select rows by numbers, rewards and texts."""

import pytest

from flowrl.report.viewer.row_filter import FilterError, parse_filter
from tests.report.viewer.saved_rows import TOKENS, make_row

ROWS = [
    make_row(0, score=0.0, response_length=3, response="Alpha beta", rewards={"format": 1.0}, finish_reason="stop"),
    make_row(1, score=0.5, response_length=12, prompt="gamma?", rewards={"format": 0.0}, finish_reason="length"),
    make_row(2, score=1.0, response_length=30, answer="alphabet", other_scores={"size": -2.5}, tokens=TOKENS),
    make_row(3, score=None, response_length=None, response="x<y", reward_failures={"format": "late"}, set="hard"),
]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("score<0.5", [0]),
        ("score<=0.5 length>10", [1]),
        ("score>=.5", [1, 2]),
        ("score=1", [2]),
        ("score!=1", [0, 1]),
        ("!score=1", [0, 1, 3]),
        ("text:ALPHA", [0, 2]),
        ("alpha", [0, 2]),
        ("response:alpha", [0]),
        ("response:'alpha beta'", [0]),
        ('"alpha beta"', [0]),
        ("!alpha length>1", [1]),
        ("prompt:gamma", [1]),
        ("finish:length", [1]),
        ("set:hard", [3]),
        ("reward.format>0", [0]),
        ("reward.size<-1", [2]),
        ("reward.unknown<1", []),
        ("failed", [3]),
        ("tokens", [2]),
        ("text:x<y", [3]),
        ("row=3 row=2", []),
    ],
)
def test_rows_that_satisfy_all_terms_are_selected(expression: str, expected: list[int]) -> None:
    predicate = parse_filter(expression)
    assert [row["row"] for row in ROWS if predicate(row)] == expected


@pytest.mark.parametrize(
    ("expression", "facts"),
    [
        ("scor<1", ("scor", "score", "length", "reward.NAME")),
        ("score<high", ("high", "number")),
        ("score:0.5", ("score", "number", "<")),
        ('text:"open', ("quot",)),
    ],
)
def test_an_invalid_expression_is_rejected(expression: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(expression)
    assert [fact for fact in facts if fact not in str(caught.value)] == []
