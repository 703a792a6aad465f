"""Prompts of a judge, its verdicts, and the pairs of responses that it compares. All functions are pure."""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.config import ConfigError, ImportNameError, import_function
from flowrl.config.rewards.judge_settings import PLACEHOLDER, ChoiceVerdict, CustomVerdict, RatingVerdict
from flowrl.config.user_errors import error_text

_logger = logging.getLogger(__name__)

ParseVerdict = Callable[[str], float | None]
"""Type of a verdict parser: text -> score, or None if the text has no verdict."""


# Prompts.


def placeholders(prompt: str) -> tuple[str, ...]:
    """Returns the names of the columns in a judge's prompt, without duplicates."""
    return tuple(dict.fromkeys(PLACEHOLDER.findall(prompt)))


def render_prompt(prompt: str, columns: Mapping[str, Any]) -> str:
    """Replaces each placeholder of a prompt by its column. Placeholders in the text of a column stay text.

    A conversation becomes one paragraph per message, and other objects become the text of `str`. Raises KeyError if a
    column is missing.
    """
    return PLACEHOLDER.sub(lambda match: _to_text(columns[match[1]]), prompt)


def _to_text(value: Any) -> str:  # Any: a column has any type
    is_conversation = isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value)
    if is_conversation and value:
        return "\n\n".join(f"{turn.get('role', 'user')}: {turn['content']}" for turn in value)
    return str(value)


# Verdicts.


def load_verdict(config: RatingVerdict | ChoiceVerdict | CustomVerdict) -> ParseVerdict:
    """Returns the parser that the settings select. Raises ConfigError if a user's function cannot be imported."""
    match config:
        case RatingVerdict():
            return lambda text: parse_rating(text, config)
        case ChoiceVerdict():
            return lambda text: parse_choice(text, config)
    try:
        function = import_function(config.kind)
    except ImportNameError as error:
        raise ConfigError(f"verdict: {error}") from error
    return lambda text: _call_parser(function, text, config)


def parse_rating(text: str, config: RatingVerdict) -> float | None:
    """Returns the last rating of a text on a scale from 0 to 1, or None without a rating on the scale."""
    if (found := _last_match(config.pattern, text)) is None:
        return None
    try:
        rating = float(found)
    except ValueError:
        return None
    score = (rating - config.low) / (config.high - config.low)
    return score if 0 <= score <= 1 else None


def parse_choice(text: str, config: ChoiceVerdict) -> float | None:
    """Returns the score of the last choice of a text, or None without a choice that has a score."""
    found = _last_match(config.pattern, text)
    return None if found is None else config.choices.get(found)


def _last_match(pattern: str, text: str) -> str | None:
    matches = re.findall(pattern, text)
    return matches[-1] if matches else None


def _call_parser(function: Callable[..., Any], text: str, config: CustomVerdict) -> float | None:  # Any: the user's
    """Returns the finite number that a user's parser returns. An exception or another value is a failure."""
    try:
        score = float(function(text, **config.options))
    except (TypeError, ValueError):  # None, or a text without a number
        return None
    except Exception as error:  # noqa: BLE001 (a failure costs only its row)
        _logger.warning("verdict function %s raised %s", config.kind, error_text(error))
        return None
    return score if math.isfinite(score) else None


# Pairs.


def find_opponents(num_responses: int, max_comparisons: int) -> list[tuple[int, int]]:
    """Returns the pairs (i, j), i < j, of responses to compare, each once.

    Every response is in the same number of pairs: all other responses if `max_comparisons` allows it, otherwise
    `max_comparisons`, or one fewer if both numbers are odd. Response i is compared with the responses at distances 1,
    2, ... in a circle (a circulant graph).
    """
    degree = min(max_comparisons, num_responses - 1)
    distances = list(range(1, degree // 2 + 1))
    if degree % 2 and num_responses % 2 == 0:
        distances.append(num_responses // 2)
    pairs = {
        (min(i, j), max(i, j))
        for distance in distances
        for i in range(num_responses)
        if (j := (i + distance) % num_responses) != i
    }
    return sorted(pairs)


@dataclass(frozen=True)
class Comparison:
    """A pair of responses, or a response and the column `compare_with`."""

    row: int
    """Row of the first response."""
    opponent: int | None
    """Row of the other response. None stands for the column."""


def share_of_wins(
    num_rows: int, comparisons: Sequence[Comparison], verdicts: Sequence[tuple[float | None, float | None]]
) -> list[float | None]:
    """Returns the share of wins of each row, from 0 to 1, or None for a row without a valid comparison.

    Args:
        num_rows: number of rows.
        comparisons: the compared rows.
        verdicts: scores of the first of the two responses in each prompt, first with `row` in front, then with
            `opponent` in front: 1 for a win, 0.5 for a tie, 0 for a loss. None is a failure. A comparison is valid if
            both verdicts are.
    """
    results: list[list[float]] = [[] for _ in range(num_rows)]
    for comparison, (forward, backward) in zip(comparisons, verdicts, strict=True):
        if forward is None or backward is None:
            continue
        wins = (forward + 1 - backward) / 2
        results[comparison.row].append(wins)
        if comparison.opponent is not None:
            results[comparison.opponent].append(1 - wins)
    return [sum(wins) / len(wins) if wins else None for wins in results]
