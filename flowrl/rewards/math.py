"""Reward for mathematics: compares the final answer of a response with the ground truth, with the library math-verify.

Needs the extra `rewards`.
"""

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

try:
    import math_verify
except ImportError as error:
    raise ImportError(
        f"flowrl.rewards.math needs the library math-verify ({error}): pip install 'flowrl[rewards]'"
    ) from error

from flowrl.data.time_limit import TimeLimitError, time_limit
from flowrl.rewards.numbers import join_signs

_MAX_CHARACTERS = 20_000
"""Characters at the end of a response that are searched for the answer."""

_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3})")
"""Separators of thousands in LaTeX."""
_EXPONENT = re.compile(r"(?<![\w.])(?<!\d,)(?:\d+(?:\.\d+)?|\.\d+)[eE][-+]?[0-3]?\d{1,2}(?!\w)")
"""A number with an exponent below 400. math-verify would read it as a product with e."""
_HAS_LATEX = re.compile(r"\\boxed|\\fbox|\\\(|\\\[|\$[^$]+\$")
_BOX = "\\boxed{"
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNESCAPED = re.compile(r"(?<!\\)([%$])")

Expressions = list[Any]  # Any: expressions of sympy, and texts


def score(response: str, answer: object, *, only_boxed: bool = False, timeout_s: int = 5, **columns: object) -> float:
    r"""Returns 1 if the final answer of `response` is mathematically equal to `answer`, otherwise 0.

    Args:
        response: the text. Its answer is the last `\boxed{...}`, otherwise the text after the last `####`, otherwise
            the last formula or number.
        answer: ground truth: a number, LaTeX with or without `$` or `\boxed`, or a solution of GSM8K (`... #### 18`).
        only_boxed: ignores a response without `\boxed{...}`.
        timeout_s: seconds after which a response that is hard to evaluate, such as a huge power, scores 0. The limit
            needs the main thread of a process. In other threads, only `reward.timeout_s` applies.
        columns: ignored.
    Raises:
        ValueError: `answer` contains no expression, or cannot be read within `timeout_s`.
    """
    # The library warns that its own timeouts are disabled. The one of `time_limit` replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    text = _answer_of(response[-_MAX_CHARACTERS:])
    try:
        with time_limit(timeout_s):
            expected = _parse_answer(_answer_text(answer))
    except TimeLimitError as error:
        raise ValueError(f"answer {answer!r} cannot be read within {timeout_s} s: simplify it") from error
    if not expected:
        raise ValueError(f"answer {answer!r} contains no number or formula: correct the data, or use another reward")
    if only_boxed and not text.startswith(_BOX):
        return 0.0
    try:
        with time_limit(timeout_s):
            return float(_is_equal(expected, text))
    except (TimeLimitError, RecursionError, MemoryError, OverflowError):  # deep nesting or huge numbers
        return 0.0


def extract_answer(response: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` of a response, otherwise the text after its last `####`.

    Returns None if it has neither. Use it for `evaluation.extract_answer`. Spaces are removed, and U+2212 becomes `-`.
    Other differences of notation count as different answers.
    """
    text = _answer_of(response[-_MAX_CHARACTERS:]).replace("\u2212", "-")
    if text.startswith(_BOX):
        return "".join(text[len(_BOX) : -1].split())
    return "".join(text.split()) if "####" in response[-_MAX_CHARACTERS:] else None


def _is_equal(expected: tuple[Any, ...], text: str) -> bool:
    return math_verify.verify(list(expected), _parse(text), allow_set_relation_comp=True, timeout_seconds=None)


def _answer_of(response: str) -> str:
    """Returns the last complete box of a response, otherwise the text after the last `####`, otherwise all text."""
    end = len(response)
    while (start := response.rfind(_BOX, 0, end)) >= 0:
        depth = 0
        for match in _BRACE.finditer(response, start + len(_BOX) - 1, end):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return response[start : match.end()]
        end = start  # The box is not closed, so an earlier one is the last.
    return response.rpartition("####")[2]


def _parse(text: str) -> Expressions:
    text = _THOUSANDS.sub("", join_signs(text.replace("\u2212", "-").replace(r"\$", "")))
    text = _EXPONENT.sub(lambda match: f"{Decimal(match[0]):f}", text)
    extraction = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]
    return math_verify.parse(text, extraction, parsing_timeout=None)  # pyright: ignore[reportArgumentType] (None: off)


def _answer_text(answer: object) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"answer is {answer!r}, but must be text or a number: correct the data")
    return str(answer)


@lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:  # Any: expressions of sympy, and texts
    """Returns the expressions of a ground truth, or an empty tuple."""
    if "####" in answer:
        answer = answer.rpartition("####")[2]
    answer = answer.strip()
    if not answer:
        return ()
    answer = _answer_of(answer)
    if not _HAS_LATEX.search(answer):
        # A price or percentage is written without the backslash of LaTeX.
        answer = _BOX + _UNESCAPED.sub(r"\\\1", answer) + "}"
    return tuple(_parse(answer))
