"""Compares settings of runs, and values of JSON that two runs, or a recorded step and its replay, have stored."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Change = tuple[str, Any, Any]  # Any: values of JSON
"""Name and both values of a difference. A missing value is None."""

_MAX_SHOWN = 60
"""Largest number of characters of a value in a message or table."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference at which two numbers count as equal: `relative` times the largest of both magnitudes and
    `floor`.
    """

    relative: float
    floor: float = 1.0

    def limit(self, *magnitudes: float) -> float:
        """Returns the largest difference at which numbers with these magnitudes count as equal."""
        return self.relative * max(*magnitudes, self.floor)


def changed_values(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: Tolerance | None) -> list[Change]:
    """Returns the entries that differ between two mappings. `tolerance` is as in `first_difference`."""
    values = [(name, first.get(name), second.get(name)) for name in dict.fromkeys((*first, *second))]
    return [(name, one, other) for name, one, other in values if first_difference(one, other, tolerance)]


def first_difference(first: Any, second: Any, tolerance: Tolerance | None) -> str:  # Any: values of JSON
    """Returns the first difference of two values as text, such as `was 1 and is now 2`, or an empty string.

    NaN equals NaN. Without a tolerance, equal values are bitwise identical. With a tolerance, checksums are ignored.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        names = dict.fromkeys((*first, *second))
        return _first(names, lambda name: (first.get(name, "missing"), second.get(name, "missing")), tolerance)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return _first(range(len(first)), lambda index: (first[index], second[index]), tolerance)
    is_same = json.dumps(first) == json.dumps(second) if tolerance is None else _is_close(first, second, tolerance)
    return "" if is_same else f"was {shorten(first)} and is now {shorten(second)}"


def _first(keys: Iterable[Any], pair: Callable[[Any], tuple[Any, Any]], tolerance: Tolerance | None) -> str:
    for key in keys:
        if key == "crc32" and tolerance is not None:
            continue
        if difference := first_difference(*pair(key), tolerance):
            return difference if key in ("crc32", "result") else f"{key} {difference}"
    return ""


def _is_close(first: Any, second: Any, tolerance: Tolerance) -> bool:
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return first == second
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second or abs(first - second) <= tolerance.limit(abs(first), abs(second))


def shorten(value: Any) -> str:
    """Returns a value as text, which is cut after 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by dotted key, in the order of the config. Lists and empty groups are values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{key}": inner for key, inner in flatten_settings(value).items()}
        else:
            flat[str(name)] = value
    return flat


def compare_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns an entry per key of any config: `values` has the value of each config as text, None if it is absent.

    `differs` is true if the configs have different values.
    """
    flat = [flatten_settings(config) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    entries = []
    for key in keys:
        values = [_text(settings[key]) if key in settings else None for settings in flat]
        entries.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return entries


def _text(value: Any) -> str:  # Any: the value of a setting
    return value if isinstance(value, str) else json.dumps(value, default=str)
