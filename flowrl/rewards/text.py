"""Rewards for the form of a response: tags or a pattern, length, and language."""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

_MAX_CHARACTERS = 100_000
"""Largest response, in characters, that is matched with a regular expression of the user."""


def has_tags(
    response: str,
    tagged_response: str | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    strict: bool = True,
    **columns: object,
) -> float:
    """Returns 1 if a response has one section per tag in this order, such as `<think>...</think><answer>...</answer>`.

    Args:
        response: the text.
        tagged_response: the tags that the prompt opened, such as `<think>`, then the text with special tokens. The
            tags of the prompt count as part of the response. None: equal to `response`.
        tags: names of the tags. Each occurs exactly once, has a section that is not blank, and contains no other tag.
        strict: also rejects text outside of the sections, except white space.
        columns: ignored.
    """
    text = response if tagged_response is None else tagged_response
    names = "|".join(map(re.escape, tags))
    found = list(re.finditer(rf"<(/?)({names})>", text))
    if [match[0] for match in found] != [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]:
        return 0.0
    sections = [text[found[i].end() : found[i + 1].start()] for i in range(0, len(found), 2)]
    ends = [0, *(match.end() for match in found[1::2])]
    starts = [*(match.start() for match in found[::2]), len(text)]
    outside = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
    return float(all(section.strip() for section in sections) and not (strict and outside.strip()))


def matches(response: str, *, pattern: str, **columns: object) -> float:
    """Returns 1 if the complete response matches a regular expression, otherwise 0.

    Args:
        response: the text. A response of more than 100,000 characters scores 0.
        pattern: regular expression of Python. A dot also matches line breaks.
        columns: ignored.
    Raises:
        ValueError: `pattern` is not a regular expression.
    """
    return float(len(response) <= _MAX_CHARACTERS and _compile(pattern).fullmatch(response) is not None)


@lru_cache
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def length(
    response: str,
    token_ids: Sequence[int] | None = None,
    *,
    unit: Literal["characters", "words", "tokens"] = "characters",
    minimum: int = 0,
    maximum: int | None = None,
    tolerance: int = 0,
    **columns: object,
) -> float:
    """Returns 1 if the length of a response is between `minimum` and `maximum`, otherwise 0.

    Args:
        response: the text.
        token_ids: tokens of the response, which `unit: tokens` counts. They include those of an environment.
        unit: what is counted. Words are separated by white space.
        minimum: smallest length.
        maximum: largest length. None: no limit.
        tolerance: length over which the score falls linearly from 1 to 0 below `minimum` and above `maximum`.
        columns: ignored.
    Raises:
        ValueError: an option is invalid, or `unit` is tokens but `token_ids` is missing.
    """
    if maximum is not None and minimum > maximum:
        raise ValueError(f"minimum {minimum} is larger than maximum {maximum}: exchange them")
    if unit == "tokens" and token_ids is None:
        raise ValueError("unit is tokens, but the function has not received token_ids: request the token ids")
    match unit:
        case "characters":
            count = len(response)
        case "words":
            count = len(response.split())
        case "tokens":
            assert token_ids is not None
            count = len(token_ids)
        case _:
            raise ValueError(f"unit is {unit!r}, but must be characters, words or tokens")
    excess = max(minimum - count, count - (count if maximum is None else maximum), 0)
    return max(0.0, 1 - excess / tolerance) if tolerance > 0 else float(excess == 0)


_SCRIPTS = {
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",),
    "bengali": ("BENGALI",),
    "tamil": ("TAMIL",),
    "thai": ("THAI",),
    "chinese": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "KATAKANA-HIRAGANA"),
    "korean": ("HANGUL", "HALFWIDTH HANGUL"),
}
"""Script -> first words of the Unicode names of its letters."""


def language(response: str, *, script: str = "latin", threshold: float | None = None, **columns: object) -> float:
    """Returns the share of letters of a response that belong to a script. Without letters, the score is 0.

    A script is not a language: English and French both have the script latin.

    Args:
        response: the text. Digits, punctuation and symbols do not count.
        script: latin, cyrillic, greek, arabic, hebrew, devanagari, bengali, tamil, thai, chinese, japanese or korean.
        threshold: returns 1 from this share on, otherwise 0. None returns the share.
        columns: ignored.
    Raises:
        ValueError: `script` is unknown.
    """
    if script not in _SCRIPTS:
        raise ValueError(f"script is {script!r}, but must be one of {', '.join(_SCRIPTS)}")
    letters = [character for character in response if character.isalpha()]
    if not letters:
        return 0.0
    share = sum(_is_in_script(letter, script) for letter in letters) / len(letters)
    return share if threshold is None else float(share >= threshold)


@lru_cache(maxsize=65536)
def _is_in_script(letter: str, script: str) -> bool:
    # Letters in another form, such as full-width Latin, have the name of their plain form after normalization.
    plain = unicodedata.normalize("NFKC", letter)[:1]
    return unicodedata.name(plain, "").startswith(_SCRIPTS[script])
