"""Filter expressions of the viewer, such as `score<0.5 length>10 text:abc`."""

import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

from flowrl.config import UserError
from flowrl.report.rollout_log import Row

Predicate = Callable[[Row], bool]

NUMBERS = {
    "score": "score",
    "advantage": "advantage",
    "length": "response_length",
    "environment": "environment_length",
    "version": "version",
    "staleness": "staleness",
    "row": "row",
    "prompt_id": "prompt_id",
    "sample": "sample",
}
"""Name in an expression -> column of a number."""

TEXTS = {
    "text": ("prompt", "response", "answer"),
    "prompt": ("prompt",),
    "response": ("response",),
    "answer": ("answer",),
    "finish": ("finish_reason",),
    "set": ("set",),
}
"""Name in an expression -> columns of texts. At least one of these columns must contain the given text."""

REWARD = "reward."
"""Prefix of the name of a reward or another score, such as `reward.format`."""

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_COMPARISON = re.compile(r"([\w./-]+?)(<=|>=|!=|<|>|=)(.+)")
_CONTENT = re.compile(r"(\w+):(.+)", re.S)


class FilterError(UserError):
    """Raised if a filter expression is invalid."""


def parse_filter(expression: str) -> Predicate:
    """Returns a predicate that is true for rows that satisfy all terms of an expression.

    Terms are separated by spaces, and quotes group words. A term is one of these:

    - a comparison of a number: `score<0.5`, `reward.format=1`. Rows without the number are not selected.
    - a text that a column contains: `response:abc`. A word without a column is searched in the prompt, the response and
      the answer. Case is ignored.
    - `failed`: a reward failed. `tokens`: the row has values per token.

    A `!` before a term negates it.

    Raises FilterError if a term is invalid.
    """
    try:
        terms = shlex.split(expression)
    except ValueError as error:
        raise FilterError(f"filter {expression!r}: {error}; close the quotes") from error
    predicates = [_parse_term(term) for term in terms]
    return lambda row: all(predicate(row) for predicate in predicates)


def _parse_term(term: str) -> Predicate:
    if len(term) > 1 and term.startswith("!"):
        positive = _parse_term(term[1:])
        return lambda row: not positive(row)
    if term == "failed":
        return lambda row: bool(row["reward_failures"])
    if term == "tokens":
        return lambda row: row["tokens"] is not None
    if (content := _CONTENT.fullmatch(term)) and content[1] in TEXTS:
        return _contains(TEXTS[content[1]], content[2])
    if comparison := _COMPARISON.fullmatch(term):
        return _compare(*comparison.groups())
    if content and content[1] in (*NUMBERS, *(name.rstrip("s") for name in TEXTS)):
        raise FilterError(f"filter {term!r}: {content[1]} is a number: compare it, as in {content[1]}<1")
    return _contains(TEXTS["text"], term)


def _contains(columns: tuple[str, ...], text: str) -> Predicate:
    lower = text.lower()
    return lambda row: any(row[name] is not None and lower in str(row[name]).lower() for name in columns)


def _compare(name: str, sign: str, text: str) -> Predicate:
    if name not in NUMBERS and not name.startswith(REWARD):
        raise FilterError(
            f"filter {name}{sign}{text}: unknown number {name!r}; available: {', '.join(NUMBERS)}, {REWARD}NAME "
            f"(for a text, write text:{name}{sign}{text})"
        )
    try:
        number = float(text)
    except ValueError:
        raise FilterError(f"filter {name}{sign}{text}: {text!r} is not a number") from None
    compare = _OPERATORS[sign]

    def predicate(row: Row) -> bool:
        value = read_number(row, name)
        return value is not None and compare(value, number)

    return predicate


def read_number(row: Row, name: str) -> float | None:
    """Returns a number of a row by its name in expressions, or None if the row lacks it."""
    if not name.startswith(REWARD):
        return row[NUMBERS[name]]
    own = name.removeprefix(REWARD)
    return {**(row["other_scores"] or {}), **(row["rewards"] or {})}.get(own)
