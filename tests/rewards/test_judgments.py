"""Prompts, verdicts and pairs of judges, against values computed by hand."""

import pytest

from flowrl.config import ConfigError
from flowrl.config.rewards.judge_settings import (
    PAIRWISE_PROMPT,
    POINTWISE_PROMPT,
    ChoiceVerdict,
    CustomVerdict,
    RatingVerdict,
)
from flowrl.rewards.judgments import (
    Comparison,
    find_opponents,
    load_verdict,
    parse_choice,
    parse_rating,
    placeholders,
    render_prompt,
    share_of_wins,
)


def test_a_prompt_contains_the_columns() -> None:
    assert render_prompt("{prompt} = {response}? {answer}", {"prompt": "1+1", "response": 2, "answer": None}) == (
        "1+1 = 2? None"
    )


def test_placeholders_in_a_response_stay_text() -> None:
    columns = {"response": "{answer} {response}", "answer": "secret"}
    assert render_prompt("[{response}]", columns) == "[{answer} {response}]"


def test_other_braces_of_a_prompt_are_text() -> None:
    text = 'JSON such as {"score": 1}, a set {1, 2}, or {}: {response}'
    assert placeholders(text) == ("response",)
    assert render_prompt(text, {"response": "r"}) == text.replace("{response}", "r")


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(KeyError, match="rubric"):
        render_prompt("{response} {rubric}", {"response": "r"})


def test_a_conversation_has_a_paragraph_per_message() -> None:
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert render_prompt("{conversation}", {"conversation": turns}) == "user: 1+1\n\nassistant: 2"


def test_the_default_prompts_have_the_placeholders_of_their_kind() -> None:
    assert placeholders(POINTWISE_PROMPT) == ("prompt", "response")
    assert placeholders(PAIRWISE_PROMPT) == ("prompt", "response_a", "response_b")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Rating: [[1]]", 0.0),
        ("Rating: [[10]]", 1.0),
        ("Good. Rating: [[5.5]]", 0.5),
        ("Rating: [[2]]? No. Rating: [[10]]", 1.0),
        ("Rating: [[0]]", None),
        ("Rating: [[11]]", None),
        ("Rating: 7", None),
        ("", None),
    ],
)
def test_a_rating_becomes_a_score_from_0_to_1(text: str, score: float | None) -> None:
    assert parse_rating(text, RatingVerdict()) == score


def test_a_scale_can_be_reversed() -> None:
    grades = RatingVerdict(pattern=r"Note (\d)", low=6, high=1)
    assert parse_rating("Note 1", grades) == 1.0
    assert parse_rating("Note 6", grades) == 0.0
    assert parse_rating("Note 2", grades) == pytest.approx(0.8)


def test_a_rating_that_is_no_number_is_a_failure() -> None:
    assert parse_rating("Rating: good", RatingVerdict(pattern=r"Rating: (\w+)")) is None


@pytest.mark.parametrize(("text", "score"), [("[[A]]", 1), ("[[B]]", 0), ("[[A]] or [[C]]", 0.5), ("[[D]]", None)])
def test_a_choice_has_a_score(text: str, score: float | None) -> None:
    assert parse_choice(text, ChoiceVerdict()) == score


def test_a_choice_without_a_score_is_a_failure() -> None:
    verdict = ChoiceVerdict(pattern=r"(\w+)\.$", choices={"yes": 1.0, "no": -1.0})
    assert [parse_choice(text, verdict) for text in ("Oh yes.", "Oh no.", "Oh well.")] == [1.0, -1.0, None]


def test_a_users_parser_returns_a_score_or_fails() -> None:
    parse = load_verdict(CustomVerdict(kind="tests.workers.judges:count_letters", options={"letter": "o"}))
    assert [parse(text) for text in ("wood", "tree")] == [2.0, None]
    assert load_verdict(CustomVerdict(kind="tests.workers.judges:fail"))("text") is None
    with pytest.raises(KeyboardInterrupt):
        load_verdict(CustomVerdict(kind="tests.workers.judges:interrupt"))("text")
    with pytest.raises(ConfigError, match="verdict"):
        load_verdict(CustomVerdict(kind="tests.workers.judges:missing"))


@pytest.mark.parametrize(
    ("num_responses", "max_comparisons", "pairs"),
    [
        (1, 4, []),
        (2, 4, [(0, 1)]),
        (3, 2, [(0, 1), (0, 2), (1, 2)]),
        (4, 2, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        (4, 3, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        (5, 3, [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_responses_are_compared_in_a_circle(
    num_responses: int, max_comparisons: int, pairs: list[tuple[int, int]]
) -> None:
    assert find_opponents(num_responses, max_comparisons) == pairs


@pytest.mark.parametrize("num_responses", range(2, 12))
@pytest.mark.parametrize("max_comparisons", range(2, 12))
def test_all_responses_have_equally_many_opponents(num_responses: int, max_comparisons: int) -> None:
    pairs = find_opponents(num_responses, max_comparisons)
    counts = {sum(i in pair for pair in pairs) for i in range(num_responses)}
    assert len(counts) == 1 and len(set(pairs)) == len(pairs)
    (count,) = counts
    assert max_comparisons - 1 <= count <= max_comparisons or count == num_responses - 1


def test_the_score_is_the_share_of_wins() -> None:
    # Row 0 beats row 1, ties with row 2, and row 1 wins against row 2 in one order only.
    comparisons = [Comparison(0, 1), Comparison(0, 2), Comparison(1, 2)]
    verdicts = [(1.0, 0.0), (0.5, 0.5), (1.0, 1.0)]
    assert share_of_wins(3, comparisons, verdicts) == [0.75, 0.25, 0.5]


def test_a_preference_for_the_first_position_is_no_win() -> None:
    assert share_of_wins(2, [Comparison(0, 1)], [(1.0, 1.0)]) == [0.5, 0.5]


def test_a_comparison_counts_only_if_both_orders_have_a_verdict() -> None:
    comparisons = [Comparison(0, 1), Comparison(0, 2)]
    assert share_of_wins(3, comparisons, [(1.0, None), (0.0, 1.0)]) == [0.0, None, 1.0]


def test_a_column_as_opponent_gets_no_score() -> None:
    assert share_of_wins(2, [Comparison(0, None), Comparison(1, None)], [(1.0, 0.0), (0.0, 0.5)]) == [1.0, 0.25]
