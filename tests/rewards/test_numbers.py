"""Numbers in text and JSON have exact values."""

import math
import time
from fractions import Fraction

import pytest

from flowrl.rewards.numbers import canonical_text, first_number, last_number, marked_number, read_reference

VALUES = [
    # Signs.
    ("3", Fraction(3)),
    ("-3", Fraction(-3)),
    ("\u22123", Fraction(-3)),
    ("+3", Fraction(3)),
    ("x=-3", Fraction(-3)),
    ("(-3)", Fraction(-3)),
    ("**-3**", Fraction(-3)),
    ("- 3", Fraction(-3)),
    ("+ 3", Fraction(3)),
    ("\n \u2212 3", Fraction(-3)),
    ("**- 3**", Fraction(-3)),
    ("x = - 3", Fraction(-3)),
    ("x =- 3", Fraction(-3)),
    ("Total: - 3", Fraction(-3)),
    (r"\boxed{- 3}", Fraction(-3)),
    ("- $3", Fraction(-3)),
    ("$- 3$", Fraction(-3)),
    ("= \u20ac - 3", Fraction(-3)),
    ("x - 3", Fraction(3)),
    ("$x$ - 3", Fraction(3)),
    ("**Total** - 3 eggs", Fraction(3)),
    ("eggs:\n- 3", Fraction(3)),
    ("COVID-19", Fraction(19)),
    # Decimals.
    ("0.5", Fraction(1, 2)),
    (".5", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)),
    ("\u2212.5", Fraction(-1, 2)),
    ("...5", Fraction(5)),
    ("No.5", Fraction(5)),
    ("12.", Fraction(12)),
    ("12,", Fraction(12)),
    ("1.50", Fraction(3, 2)),
    # Thousands.
    ("1,234", Fraction(1234)),
    ("-1,234,567.25", Fraction(-493826_9, 4)),
    ("1{,}234", Fraction(1234)),
    (r"1\,234", Fraction(1234)),
    ("1\u202f234", Fraction(1234)),
    # Exponents.
    ("1e3", Fraction(1000)),
    ("1E+3", Fraction(1000)),
    ("1e-5", Fraction(1, 100_000)),
    ("1e\u22125", Fraction(1, 100_000)),
    ("2.5e1", Fraction(25)),
    ("2e", Fraction(2)),
    ("1e500", Fraction(10) ** 500),
    # Fractions.
    ("3/4", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)),
    ("\u22123 / 4", Fraction(-3, 4)),
    ("3\u20444", Fraction(3, 4)),
    ("1.5/2", Fraction(3, 4)),
    # Currencies and units.
    ("$18", Fraction(18)),
    ("-$18", Fraction(-18)),
    ("$-18", Fraction(-18)),
    (r"-\$18", Fraction(-18)),
    ("\u2212\u20ac 18", Fraction(-18)),
    ("$.50", Fraction(1, 2)),
    ("$5$", Fraction(5)),
    ("50%", Fraction(50)),
    ("5km/h", Fraction(5)),
    # More digits than a float has.
    ("1234567890123456789012", Fraction(1234567890123456789012)),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_number_has_its_exact_value(text: str, value: Fraction) -> None:
    assert (first_number(text), last_number(text), read_reference(text)) == (value, value, value)


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("10-12", 10, 12),
        ("10\u221212", 10, 12),
        ("7 - 3", 7, 3),
        ("3 $ - 5", 3, 5),
        ("- 3 eggs\n- 5 eggs", -3, 5),
        ("5%-10%", 5, 10),
        ("f(2)-3", 2, 3),
        ("1,23", 1, 23),
        ("1,2,3", 1, 3),
        ("1,234,5", 1, 5),
        ("1,23,456", 1, 456),
        ("-1,23.5e1", -1, 235),
        ("1,234.5,678", Fraction("1234.5"), 678),
        ("1,2/4", 1, Fraction(1, 2)),
        ("0,123", 0, 123),
        ("2024-01-05", 2024, 5),
        ("1/2/2024", 1, 2024),
        ("12.05.2024", Fraction("12.05"), 2024),
        ("10:30", 10, 30),
        ("48/2 = 24", 24, 24),
        ("1 1/2", 1, Fraction(1, 2)),
        ("2^3", 2, 3),
        (r"\frac{3}{4}", 3, 4),
    ],
)
def test_several_numbers_are_separate(text: str, first: Fraction, last: Fraction) -> None:
    assert (first_number(text), last_number(text)) == (first, last)
    with pytest.raises(ValueError, match="several"):
        read_reference(text)


@pytest.mark.parametrize(
    "text", ["", "none", "1e501", "1e999999999", "1e" + "9" * 100_000, "9" * 100_000, "3/0", "3/1e999999999"]
)
def test_a_text_without_a_finite_number_has_no_value(text: str) -> None:
    assert (first_number(text), last_number(text)) == (None, None)
    with pytest.raises(ValueError, match="answer"):
        read_reference(text)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (3, Fraction(3)),
        (-3.0, Fraction(-3)),
        (0.1, Fraction(1, 10)),
        (0.00001, Fraction(1, 100_000)),
        (2e16, Fraction(2 * 10**16)),
        (5e-324, Fraction(5, 10**324)),
        (1.5e308, Fraction(15 * 10**307)),
        ("7 and 5 make 12.\n#### 12", Fraction(12)),
        ("#### 7\n#### 12", Fraction(12)),
    ],
)
def test_a_reference_answer_is_a_json_number_or_follows_the_last_marker(answer: object, value: Fraction) -> None:
    assert read_reference(answer) == value


@pytest.mark.parametrize(
    "answer", [None, True, ["3"], math.nan, math.inf, "#### none", "7 and 5 make 12.", "#### 7 or 8"]
)
def test_a_reference_answer_that_is_not_one_number_is_rejected(answer: object) -> None:
    with pytest.raises(ValueError, match="answer"):
        read_reference(answer)


@pytest.mark.parametrize("group", [",234", "{,}234", ",23", "1-", "1.", "1/", "1e", "$ ", "- ", "= - ", " "])
def test_the_time_of_a_search_is_linear(group: str) -> None:
    text = ("1" + group * 200_000)[:200_000] + ",5"
    start_s = time.process_time()
    last_number(text)
    assert time.process_time() - start_s < 2  # 150 s if quadratic


def test_a_fraction_with_the_denominator_0_is_not_skipped() -> None:
    assert first_number("3/0 or 3") is None
    assert last_number("3 or 3/0") is None


def test_the_first_number_after_the_last_marker_counts() -> None:
    assert marked_number("#### 1 #### 2 or 3") == 2
    assert marked_number("2") is None


@pytest.mark.parametrize(
    ("texts", "canonical"),
    [
        (("1000", "1,000", "1e3", "1000.00", "2000/2", "+1000"), "1000"),
        (("-3", "\u22123", "-3.0", "-6/2"), "-3"),
        (("3",), "3"),
        (("0.5", ".5", "1/2", "5e-1"), "0.5"),
        (("1/3", "2/6"), "1/3"),
        (("-1/3",), "-1/3"),
        (("0", "-0", "0e9"), "0"),
        (("1234567890123456789012",), "1234567890123456789012"),
        (("1234567890123456789013",), "1234567890123456789013"),
    ],
)
def test_equal_numbers_have_one_canonical_text(texts: tuple[str, ...], canonical: str) -> None:
    assert {canonical_text(read_reference(text)) for text in texts} == {canonical}


@pytest.mark.parametrize("text", ["1e500", "1e-500", "1e-500/3e500", "9" * 500 + "/" + "7" * 500])
def test_the_largest_numbers_have_a_canonical_text(text: str) -> None:
    number = read_reference(text)
    assert Fraction(canonical_text(number)) == number
