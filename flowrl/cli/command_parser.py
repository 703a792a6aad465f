"""The parser of all command lines, and the types of options whose values are numbers.

The error message for an invalid command line is one sentence, which names the allowed values.
"""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, like 8") from None


def _digits(is_valid: Callable[[int], bool], allowed: str) -> Callable[[str], int]:
    """Returns the type of options with whole numbers that are not negative. `allowed` completes "is not"."""

    def read(text: str) -> int:
        if not (text.isdecimal() and is_valid(int(text))):
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return int(text)

    return read


def _number(is_valid: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    """As `_digits`, for finite numbers."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and is_valid(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return read


natural = _digits(lambda value: True, "a whole number of at least 0, like 20")
positive_count = _digits(lambda value: value >= 1, "a whole number of at least 1, like 8")
row_count = _digits(lambda value: value >= 1, "a number of rows, like 10")
port = _digits(lambda value: 0 < value < 65536, "a port from 1 to 65535")
positive = _number(lambda value: value > 0, "a number above 0, like 1.5")
seconds = _number(lambda value: value > 0, "a positive number of seconds, like 30")
temperature = _number(lambda value: value >= 0, "a temperature: write 0 for greedy, or a number like 0.8")
share = _number(lambda value: 0 < value <= 1, "a number above 0 and at most 1, like 0.9")
tolerance = _number(lambda value: 0 <= value < 1, "a number from 0 to below 1, like 1e-6")


Commands = Any  # argparse's type of sub-commands is private

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Characters that stand for bytes of an argument that are not UTF-8."""


class CommandParser(argparse.ArgumentParser):
    """Reports an invalid command line as one line on stderr, without the usage, and exits with code 2.

    Sub-commands have the same class. Unknown options are reported before missing arguments, because a misspelled option
    is often the reason why an argument is missing.
    """

    def __init__(self, **settings: Any) -> None:  # Any: the arguments of argparse
        super().__init__(**{"allow_abbrev": False, **settings})
        self.register("type", int, whole_number)  # options with type=int

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._check_options(args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self._check_options(args)  # newer releases of Python 3.12 and 3.13 do not call parse_known_args here
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the message and the command that lists the options, and exits with code 2."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists the options\n")

    def _check_options(self, args: Sequence[str] | None) -> None:
        words = sys.argv[1:] if args is None else list(args)
        if invalid := [word for word in words if _SURROGATE.search(word)]:
            self.error(f"argument {invalid[0]!r} is not UTF-8 text: use other characters")
        for index, word in enumerate(words):
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break  # the following words are arguments, or belong to a sub-command, whose parser checks them
            if self._is_unknown_option(word):
                previous = self._option_string_actions.get(words[index - 1]) if index else None
                if previous is not None and previous.nargs != 0:
                    option = words[index - 1]
                    self.error(f"{option} has no value; write {option}={word} if {word} is its value")
                self._reject(word, words[index + 1 :])

    def _is_unknown_option(self, word: str) -> bool:
        # As in argparse, a lone dash, negative numbers and texts with a space are not options.
        name = word.partition("=")[0]
        if not word.startswith("-") or word == "-" or " " in name or self._negative_number_matcher.match(word):
            return False
        return word not in self._option_string_actions and name not in self._option_string_actions

    def _reject(self, word: str, following: Sequence[str]) -> NoReturn:
        option, equals, value = word.partition("=")
        names = {name.lstrip("-"): name for name in self._option_string_actions if name.startswith("--")}
        # An abbreviation means the option that begins with it, even if a shorter option has more similar letters.
        near = [name for name in names if name.startswith(option.lstrip("-")) and option.startswith("--")]
        near = near if len(near) == 1 else difflib.get_close_matches(option.lstrip("-"), names, n=1, cutoff=0.7)
        message = f"unknown option {option}"
        if near:
            message += f" (did you mean {names[near[0]]}?)"
        elif any(action.dest == "overrides" for action in self._actions):
            if not equals:
                value = next((text for text in following[:1] if not text.startswith("-")), "VALUE")
            message += f"; settings are written without dashes: {option.lstrip('-').replace('-', '_')}={value}"
        self.error(message)
