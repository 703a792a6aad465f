"""The true preference: a hidden score of stories, and labels of pairs that follow it with noise.

Only the labels and the final comparison use the score. No training stage receives it.
"""

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from recipes.pipeline.stories import ANIMALS, BOYS, GIRLS, Prompt

WEIGHTS = {
    "one hero": 1.5,
    "solution fits": 1.5,
    "one helper": 1.0,
    "object returns": 1.0,
    "no repetition": 1.0,
    "complete ending": 1.0,
    "pronouns fit": 0.75,
    "thanks": 0.5,
}
"""Weight of each aspect in the score, in units of the log-odds of a preference."""

_KEYS = {"climbed": "tree", "jumped": "water", "fixed": "broke", "washed": "mud", "dug": "hid", "looked": "dark"}
"""First word of a solution, and a word of its problem."""

_PRONOUNS = ({"he", "his", "him"}, {"she", "her"})


def score(prompt: Prompt, story: str) -> float:
    """Returns the hidden score of a story, from 0 to the sum of WEIGHTS."""
    return sum(WEIGHTS[name] * value for name, value in rate_aspects(prompt, story).items())


def rate_aspects(prompt: Prompt, story: str) -> dict[str, float]:
    """Returns the value of each aspect, from 0 to 1."""
    sentences = [part.strip() for part in re.findall(r'[^.!?]+[.!?]"?', story)]
    words = _words(story)
    last = _words(sentences[-1]) if sentences else []
    aspects: Mapping[str, Callable[[], float]] = {
        "one hero": lambda: _fraction(word == prompt.name for word in words if word in BOYS + GIRLS),
        "solution fits": lambda: _rate_solution(words),
        "one helper": lambda: float(len({word for word in words if word in ANIMALS}) == 1),
        "object returns": lambda: _contains(last, [prompt.color, prompt.object]),
        "no repetition": lambda: max(0.0, 1 - (len(sentences) - len(set(sentences))) / 2) if sentences else 0.0,
        "complete ending": lambda: float(bool({"hugged", "home"} & set(last)) and story.rstrip().endswith(".")),
        "pronouns fit": lambda: _rate_pronouns(prompt, words),
        "thanks": lambda: float("Thank" in words),
    }
    return {name: rate() for name, rate in aspects.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def _fraction(values: Iterable[bool]) -> float:
    """Returns the fraction of true values, 0 without values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _contains(words: Sequence[str], phrase: Sequence[str]) -> float:
    size = len(phrase)
    return float(any(list(words[i : i + size]) == list(phrase) for i in range(len(words))))


def _rate_solution(words: Sequence[str]) -> float:
    """Returns 1 if the only solution in the story fits its only problem."""
    solutions = {word for word in words if word in _KEYS}
    problems = {word for word in words if word in _KEYS.values()}
    return float(len(solutions) == len(problems) == 1 and {_KEYS[word] for word in solutions} == problems)


def _rate_pronouns(prompt: Prompt, words: Sequence[str]) -> float:
    male, female = _PRONOUNS
    own = male if prompt.name in BOYS else female
    return _fraction(word.lower() in own for word in words if word.lower() in male | female)


def prefers_first(first: float, second: float, generator: random.Random) -> bool:
    """Draws a label from the Bradley-Terry model: the first story is preferred with probability
    sigmoid(first - second). Arguments are hidden scores.
    """
    return generator.random() < 1 / (1 + math.exp(second - first))


def count_win(first: float, second: float) -> float:
    """Returns 1 if the first score is larger, 0.5 if the scores are equal, otherwise 0."""
    return 0.5 * ((first > second) + (first >= second))


def win_rate(first: Sequence[float], second: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Returns the fraction of comparisons that the first policy wins, and half the width of its 95 % confidence
    interval. Ties count half.

    Args:
        first: hidden scores, `num_samples` adjacent stories per prompt.
        second: hidden scores of the other policy for the same prompts. Each story is compared with all stories of the
            other policy for the same prompt.
        num_samples: stories per prompt. Comparisons with the same prompt depend on each other, so the error is computed
            from one mean per prompt.
    """
    means = []
    for start in range(0, len(first), num_samples):
        own, other = first[start : start + num_samples], second[start : start + num_samples]
        wins = [count_win(a, b) for a in own for b in other]
        means.append(sum(wins) / len(wins))
    return mean_with_error(means)


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of independent values, and half the width of its 95 % confidence interval.

    The interval is the normal approximation, 1.96 standard errors. For a single value, it is infinite.
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, 1.96 * math.sqrt(variance / len(values))
