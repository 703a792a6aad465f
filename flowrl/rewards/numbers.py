"""Reads numbers in text and in JSON as exact fractions, for rewards that compare numbers.

A number has an optional sign (`-`, U+2212 or `+`), digits, decimals and an exponent: `-3`, `.5`, `1,234.50`, `1e-5`.
Two numbers around a slash are a fraction (`3/4`); more than two, as in the date `1/2/2024`, are separate numbers.

- Directly after a letter, a digit, `%` or a closing bracket, `-` and `+` are not signs, but hyphens, dashes of ranges
  or operators: `10-12` has the numbers 10 and 12.
- One space may follow a sign at the start of a text, or of the part after `####`, and after one of `= < > ( [ { :` or
  U+2248. Elsewhere, such a `-` is the bullet of a list, a dash or an operator: `7 - 3` has the numbers 7 and 3.
- Separators of thousands are commas, `{,}`, `\\,`, `\\!`, and no-break or thin spaces. Other commas separate numbers:
  `1,23` has two.
- A currency symbol may stand before or after the sign. Units, percent signs and a period at the end have no effect:
  `50%` is 50.
- Expressions are not evaluated: `2^3`, `1 1/2` and `2 * 10^5` have several numbers.

Numbers with more than 500 characters or an exponent beyond 500, and fractions with the denominator 0, have no value.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from itertools import islice

_MAX_SIZE = 500
"""Largest number of characters of a number, and largest absolute value of its exponent."""

_SIGN = "[-+\u2212]"
_CURRENCY = r"\\?[$\u00a2-\u00a5\u20a0-\u20cf][ ]?"
_SPACED_SIGN = re.compile(
    rf"((?:\A|(?<=[=<>\u2248(\[{{:])|(?<=[=<>\u2248(\[{{:][ ]))(?:{_CURRENCY})?{_SIGN})[ ](?=(?:{_CURRENCY}|\\)?[\w.])"
)
"""A sign and a space after a position where no operand precedes the sign."""
_SEPARATOR = r"(?:,|\{,\}|\\[,!]|[\u00a0\u2009\u202f])"


def _number_pattern(digits: str) -> re.Pattern[str]:
    """Returns the pattern of a number that has these digits before its decimals."""
    return re.compile(
        rf"""(?:(?<![^\W_])(?<![)\]}}%])(?P<sign>{_SIGN}))?
        (?:{_CURRENCY}(?P<inner_sign>{_SIGN})?)?
        (?P<number>(?P<digits>{digits})(?:\.\d++)?+|(?<![\w.])\.\d++)
        (?:[eE](?P<exponent>{_SIGN}?\d++))?""",
        re.VERBOSE,
    )


# A chain of digits and separators is one match. A search for groups of three digits would start again at each
# separator, so its time would be quadratic.
_CHAIN = _number_pattern(rf"\d++(?:{_SEPARATOR}\d++)*+")
_SINGLE = _number_pattern(r"\d++")
_GROUPS = re.compile(rf"[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})*+")
_GROUPING = re.compile(_SEPARATOR)
_SLASH = re.compile(r"[ \t]?[/\u2044\u2215][ \t]?")
_MARKER = "####"
_LEADING = " \t\r\n*`"
"""White space and markup before the start of a text."""

_EXACT = Context(prec=10 * _MAX_SIZE, traps=[Inexact])
"""Decimal arithmetic that raises `Inexact` if a quotient has no finite decimal form."""


def read_reference(answer: object) -> Fraction:
    """Returns the number of a reference answer: a JSON number, or text with one number.

    In text, only the part after the last `####` counts, if there is one. A float stands for its shortest decimal form:
    0.1 is 1/10.

    Raises:
        ValueError: the answer has no number, several numbers, or a number without a value.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"answer is {answer!r}, but must be a number, or text with one number: correct the data")
    text = answer if isinstance(answer, str) else repr(answer)
    numbers = list(islice(_split(text.rpartition(_MARKER)[2]), 2))
    if len(numbers) == 1 and (value := _value(numbers[0])) is not None:
        return value
    problem = (
        "contains no number",
        f"is a fraction with the denominator 0, or a number of more than {_MAX_SIZE} characters or with an exponent "
        f"beyond {_MAX_SIZE}",
        "contains several numbers",
    )[len(numbers)]
    raise ValueError(
        f"answer {answer!r} {problem}, but must be one number, or end with {_MARKER} and one number: correct the data, "
        f"or use another reward"
    )


def first_number(text: str) -> Fraction | None:
    """Returns the first number of a text. Returns None if it has no number, or if the first has no value."""
    return _value(next(_split(text), ()))


def last_number(text: str) -> Fraction | None:
    """Returns the last number of a text. Returns None if it has no number, or if the last has no value."""
    numbers = deque(_split(text), maxlen=1)
    return _value(numbers[0]) if numbers else None


def marked_number(text: str) -> Fraction | None:
    """Returns the first number after the last `####` of a text. Returns None if there is none or it has no value."""
    _, marker, rest = text.rpartition(_MARKER)
    return first_number(rest) if marker else None


def canonical_text(number: Fraction) -> str:
    """Returns the canonical text of a number: a decimal without an exponent if it is finite (`1000`, `-0.5`), otherwise
    the reduced fraction (`-1/3`).
    """
    try:
        quotient = _EXACT.divide(Decimal(number.numerator), Decimal(number.denominator))
    except Inexact:
        return str(number)
    return f"{quotient.normalize(_EXACT):f}"


def join_signs(text: str) -> str:
    """Returns a text without its leading white space and markup, and without the space after signs of numbers."""
    return _SPACED_SIGN.sub(r"\1", text.lstrip(_LEADING))


def _split(text: str) -> Iterator[Sequence[re.Match[str]]]:
    """Yields the numbers of a text: one match for each number, two for each fraction."""
    text = join_signs(text)
    chain: list[re.Match[str]] = []
    for match in _find_numbers(text):
        if chain and _SLASH.fullmatch(text, chain[-1].end(), match.start()):
            chain.append(match)
            continue
        yield from _fractions(chain)
        chain = [match]
    yield from _fractions(chain)


def _find_numbers(text: str) -> Iterator[re.Match[str]]:
    """Yields a match for each number of a text, without regard to slashes."""
    for match in _CHAIN.finditer(text):
        if _GROUPS.fullmatch(match["digits"] or ""):
            yield match
        else:  # Commas separate numbers.
            yield from _SINGLE.finditer(text, match.start(), match.end())


def _fractions(chain: Sequence[re.Match[str]]) -> Iterator[Sequence[re.Match[str]]]:
    """Yields the numbers of a chain of matches with slashes between them."""
    if len(chain) == 2:
        yield chain
    else:
        yield from ((match,) for match in chain)


def _value(number: Sequence[re.Match[str]]) -> Fraction | None:
    values = [value for match in number if (value := _match_value(match)) is not None]
    if not values or len(values) < len(number):
        return None
    numerator, denominator = values[0], values[1] if len(values) == 2 else Fraction(1)
    return None if denominator == 0 else numerator / denominator


def _match_value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_SIZE:
        return None
    exponent = int((match["exponent"] or "0").replace("\u2212", "-"))
    if abs(exponent) > _MAX_SIZE:
        return None
    value = Fraction(Decimal(_GROUPING.sub("", match["number"])).scaleb(exponent, _EXACT))
    return -value if (match["sign"] or match["inner_sign"] or "+") in "-\u2212" else value
