"""The stories of the pipeline, their hidden score, the labels of pairs, and the comparison of scores."""

import math
import random

import pytest

from recipes.pipeline.comparison import compare_at_equal_reward
from recipes.pipeline.judge import (
    WEIGHTS,
    count_win,
    mean_with_error,
    prefers_first,
    rate_aspects,
    score,
    win_rate,
)
from recipes.pipeline.sampling import judge_accuracy, label
from recipes.pipeline.stories import DEFECTS, OBJECTS, Prompt, all_prompts, tell, tell_with

TOM = Prompt("Tom", "red", "ball", "park")
GOOD = (
    "Tom went to the park with his red ball. The wind blew the ball into a tree. Tom was very sad. A kind fox wanted "
    'to help. The fox climbed up and got the ball. "Thank you!" said Tom. In the end, he went home with his red ball.'
)


def test_stories_depend_only_on_the_seed() -> None:
    def stories(seed: int) -> list[str]:
        generator = random.Random(seed)
        return [tell(prompt, generator) for prompt in all_prompts(seed)[:20]]

    assert stories(0) == stories(0)
    assert stories(0) != stories(1)


def test_all_prompts_are_different_and_can_be_parsed() -> None:
    prompts = all_prompts(0)
    assert len(set(prompts)) == len(prompts) == 16 * 8 * len(OBJECTS) * 6
    assert all(Prompt.parse(prompt.text) == prompt for prompt in prompts)


def test_a_story_without_defects_has_the_largest_score() -> None:
    generator = random.Random(0)
    for prompt in all_prompts(0)[:200]:
        story = tell_with(prompt, set(), generator)
        assert score(prompt, story) == sum(WEIGHTS.values()), story


@pytest.mark.parametrize(
    ("defect", "aspect"),
    [
        ("name", "one hero"),
        ("object", "object returns"),
        ("solution", "solution fits"),
        ("animal", "one helper"),
        ("repetition", "no repetition"),
        ("pronoun", "pronouns fit"),
        ("ending", "complete ending"),
        ("thanks", "thanks"),
    ],
)
def test_each_defect_lowers_its_aspect(defect: str, aspect: str) -> None:
    generator = random.Random(0)
    for prompt in all_prompts(0)[:50]:
        assert rate_aspects(prompt, tell_with(prompt, {defect}, generator))[aspect] < 1


def test_each_aspect_has_a_defect() -> None:
    assert len(WEIGHTS) == len(DEFECTS)


def test_the_score_of_a_known_story() -> None:
    assert score(TOM, GOOD) == 8.25
    # Without the last sentence, the ending (1) and the object in it (1) are missing.
    assert score(TOM, GOOD[: GOOD.index("In the end")]) == 6.25
    # One of four names is wrong: 1.5 / 4 is missing.
    assert score(TOM, GOOD.replace("said Tom", "said Ben")) == pytest.approx(8.25 - 1.5 / 3)
    # Both pronouns are wrong.
    assert score(TOM, GOOD.replace("he went", "she went").replace("his", "her")) == 7.5
    # One of eight sentences is a repetition, which costs half of its weight.
    assert score(TOM, GOOD.replace("Tom was very sad.", "Tom was very sad. Tom was very sad.")) == 7.75


@pytest.mark.parametrize("story", ["", " ", ".", "\n\n", '"', "water water hid", "Tom"])
def test_degenerate_stories_have_low_scores(story: str) -> None:
    assert 0 <= score(TOM, story) <= 3


def test_labels_follow_the_bradley_terry_model() -> None:
    generator = random.Random(0)
    draws = [prefers_first(math.log(3), 0.0, generator) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(3 / 4, abs=0.01)  # sigmoid(log 3) = 3 / 4, error 0.003
    assert sum(prefers_first(30.0, 0.0, generator) for _ in range(100)) == 100


def test_a_pair_has_the_preferred_story_as_chosen() -> None:
    pairs = [label(TOM.text, GOOD, "Tom.", random.Random(seed)) for seed in range(50)]
    chosen = [pair["chosen"][0]["content"] for pair in pairs if pair is not None]
    assert len(chosen) == 50 and chosen.count(GOOD) >= 48  # the score differs by more than 5
    assert pairs[0] is not None and pairs[0]["context"] == [{"from": "human", "content": TOM.text}]
    assert {pairs[0][side][0]["content"] for side in ("chosen", "rejected")} == {GOOD, "Tom."}


@pytest.mark.parametrize(("first", "second"), [(GOOD, GOOD), ("", GOOD), (GOOD, " \n")])
def test_equal_and_empty_stories_are_not_a_pair(first: str, second: str) -> None:
    assert label(TOM.text, first, second, random.Random(0)) is None


def test_the_accuracy_of_the_score_counts_ties_half() -> None:
    def pair(chosen: str, rejected: str) -> dict:
        turns = {"chosen": [{"content": chosen}], "rejected": [{"content": rejected}]}
        return {"context": [{"content": TOM.text}]} | turns

    assert judge_accuracy([pair(GOOD, "Tom."), pair("Tom.", GOOD), pair("a", "b"), pair(GOOD, "a")]) == 2.5 / 4


def test_wins_and_ties() -> None:
    assert [count_win(2, 1), count_win(1, 1), count_win(0, 1)] == [1, 0.5, 0]


def test_the_mean_has_a_95_percent_interval() -> None:
    # Variance (0.25 + 0.25 + 0.25 + 0.25) / 3 = 1 / 3, standard error sqrt(1 / 12).
    mean, error = mean_with_error([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and error == pytest.approx(1.96 / math.sqrt(12))
    assert mean_with_error([0.25]) == (0.25, math.inf)


def test_the_win_rate_compares_stories_of_the_same_prompt() -> None:
    # Prompt 1: 3 and 1 against 2 and 1 win, win, lose, tie: 2.5 / 4. Prompt 2: all equal: 0.5.
    rate, error = win_rate([3, 1, 5, 5], [2, 1, 5, 5], num_samples=2)
    assert rate == pytest.approx((2.5 / 4 + 0.5) / 2)
    # Means 0.625 and 0.5: variance 0.125^2 / 2 with one degree of freedom, divided by two prompts.
    assert error == pytest.approx(1.96 * 0.125 / 2)


def test_the_win_rates_of_both_policies_add_up_to_one() -> None:
    generator = random.Random(0)
    first, second = ([generator.randrange(4) for _ in range(60)] for _ in range(2))
    assert win_rate(first, second, 3)[0] + win_rate(second, first, 3)[0] == pytest.approx(1)


def test_perplexities_are_compared_at_the_highest_common_reward() -> None:
    """The second run reaches reward 3 halfway between its checkpoints; the first run ends there."""
    with_ptx = [{"reward": 1.0, "perplexity": 1.4}, {"reward": 3.0, "perplexity": 1.5}]
    without = [{"reward": 1.0, "perplexity": 1.4}, {"reward": 2.0, "perplexity": 1.6}, {"reward": 4.0, "perplexity": 2}]
    result = compare_at_equal_reward({"ppo": with_ptx, "ppo_without_ptx": without})
    assert result == pytest.approx({"reward": 3.0, "ppo": 1.5, "ppo_without_ptx": 1.8})


def test_a_run_that_never_exceeds_the_first_reward_is_compared_there() -> None:
    falling, rising = ([{"reward": 1.0, "perplexity": 1.4}, {"reward": end, "perplexity": 2.0}] for end in (0.5, 2.0))
    result = compare_at_equal_reward({"falling": falling, "rising": rising})
    assert result == pytest.approx({"reward": 1.0, "falling": 1.4, "rising": 1.4})
