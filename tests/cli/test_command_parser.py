"""Values of options: accepted numbers, and rejected texts."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from flowrl.cli.command_parser import (
    natural,
    port,
    positive,
    positive_count,
    row_count,
    seconds,
    share,
    temperature,
    tolerance,
    whole_number,
)

CASES: list[tuple[Callable[[str], float], list[tuple[str, float]], list[str]]] = [
    (whole_number, [("0", 0), ("-3", -3)], ["", "1.5", "x"]),
    (natural, [("0", 0), ("20", 20)], ["-1", "1.0", "1_000", ""]),
    (positive_count, [("1", 1)], ["0", "-1", "2.5"]),
    (row_count, [("10", 10)], ["0", "all"]),
    (port, [("1", 1), ("65535", 65535)], ["0", "65536", "http"]),
    (positive, [("0.5", 0.5)], ["0", "-1", "nan", "inf"]),
    (seconds, [("30", 30)], ["0", "30s", "inf"]),
    (temperature, [("0", 0), ("0.8", 0.8)], ["-0.1", "hot", "nan", "inf"]),
    (share, [("1", 1), ("0.9", 0.9)], ["0", "1.1", "nan"]),
    (tolerance, [("0", 0), ("1e-6", 1e-6)], ["1", "-1e-9", "nan"]),
]


@pytest.mark.parametrize(("read", "valid", "invalid"), CASES, ids=[case[0].__name__ for case in CASES])
def test_numbers_outside_of_the_range_are_rejected(
    read: Callable[[str], float], valid: list[tuple[str, float]], invalid: list[str]
) -> None:
    assert [read(text) for text, _ in valid] == [value for _, value in valid]
    for text in invalid:
        with pytest.raises(ArgumentTypeError) as caught:
            read(text)
        assert repr(text) in str(caught.value)
