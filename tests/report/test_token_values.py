"""Values per token, color scales and segments of a saved row."""

from typing import Any

import pytest

from flowrl.report.rollout_log import COLUMNS, Row
from flowrl.report.token_values import (
    METRICS,
    ColorScale,
    available_metrics,
    blend,
    color_scale,
    segments_of,
    token_values,
)


def make_row(**values: Any) -> Row:
    return dict.fromkeys(COLUMNS) | {"response": "ab", "response_length": 2} | values


TOKENS = {
    "text": ["a", "X", "b"],
    "ids": [5, 6, 7],
    "mask": [1, 0, 1],
    "logprobs": [-1.0, None, -2.0],
    "rollout_logprobs": [-1.5, None, -1.0],
    "ratios": [1.6487, None, 0.36788],
    "advantages": [0.5, None, -2.0],
    "versions": [3, None, 5],
}


def test_only_metrics_with_values_are_available() -> None:
    assert available_metrics(make_row(tokens=TOKENS)) == list(METRICS)
    without = {name: own for name, own in TOKENS.items() if name not in ("logprobs", "ratios")}
    assert available_metrics(make_row(tokens=without)) == ["advantage", "mask", "version"]
    assert available_metrics(make_row()) == []


def test_values_of_the_metrics() -> None:
    row = make_row(tokens=TOKENS)
    assert token_values(row, "advantage") == [0.5, None, -2.0]
    assert token_values(row, "gap") == [0.5, None, -1.0]
    assert token_values(row, "mask") == [1, 0, 1]
    assert token_values(row, "version") == [3, None, 5]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("advantage", [0.5, None, -2.0], ColorScale(-2.0, 2.0, 0.0)),
        ("ratio", [1.5, 0.75], ColorScale(0.5, 1.5, 1.0)),
        ("version", [3, None, 5], ColorScale(3, 5, 3)),
        ("mask", [1, 1], ColorScale(0.0, 1.0, 0.0)),
        ("gap", [None], ColorScale(0.0, 0.0, 0.0)),
    ],
)
def test_a_scale_covers_all_values(metric: str, values: list[float | None], expected: ColorScale) -> None:
    assert color_scale(metric, values) == expected


def test_positions_are_within_the_scale() -> None:
    scale = ColorScale(-2.0, 2.0, 0.0)
    assert [scale.position(value) for value in (-3.0, -2.0, 0.0, 0.5, 9.0)] == [-1.0, -1.0, 0.0, 0.25, 1.0]
    assert ColorScale(1.0, 1.0, 1.0).position(1.0) == 0.0


def test_a_color_is_between_background_and_end() -> None:
    assert blend(0.0, (10, 20, 30)) == (10, 20, 30)
    assert blend(-1.0, (10, 20, 30)) == (0x21, 0x66, 0xAC)
    assert blend(0.5, (0, 0, 0)) == (108, 54, 6)


def test_a_response_without_an_environment_is_one_segment() -> None:
    assert segments_of(make_row()) == [{"kind": "policy", "start": 0, "end": 2, "text": "ab"}]
    parts = [{"kind": "policy", "start": 0, "end": 1, "text": "a"}]
    assert segments_of(make_row(segments=parts)) == parts
    assert segments_of(make_row(response_length=None)) == []
