"""Types of options whose values are numbers, for argparse. A wrong value raises an error that says what is allowed."""

import argparse
import math
from collections.abc import Callable


def _read(text: str, is_valid: Callable[[float], bool], allowed: str) -> float:
    """Returns the number. Raises ArgumentTypeError if it is not finite or not valid. `allowed` completes "is not"."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_valid(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value


def _read_digits(text: str, is_valid: Callable[[int], bool], allowed: str) -> int:
    """As `_read`, for a whole number that is not negative."""
    if not (text.isdecimal() and is_valid(int(text))):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return int(text)


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, like 8") from None


def natural(text: str) -> int:
    return _read_digits(text, lambda value: True, "a whole number of at least 0, like 20")


def positive_count(text: str) -> int:
    return _read_digits(text, lambda value: value >= 1, "a whole number of at least 1, like 8")


def row_count(text: str) -> int:
    return _read_digits(text, lambda value: value >= 1, "a number of rows, like 10")


def port(text: str) -> int:
    return _read_digits(text, lambda value: 0 < value < 65536, "a port from 1 to 65535")


def positive(text: str) -> float:
    return _read(text, lambda value: value > 0, "a number above 0, like 1.5")


def seconds(text: str) -> float:
    return _read(text, lambda value: value > 0, "a positive number of seconds, like 30")


def temperature(text: str) -> float:
    return _read(text, lambda value: value >= 0, "a temperature: write 0 for greedy, or a number like 0.8")


def share(text: str) -> float:
    return _read(text, lambda value: 0 < value <= 1, "a number above 0 and at most 1, like 0.9")


def tolerance(text: str) -> float:
    return _read(text, lambda value: 0 <= value < 1, "a number from 0 to below 1, like 1e-6")
