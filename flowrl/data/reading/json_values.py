"""Reads JSON text strictly, and converts the columns of a row to values that JSON can represent."""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from flowrl.data.reading.row_problems import RowProblem


def parse_strictly(text: str, start: int = 0) -> tuple[Any, int]:  # Any: any JSON value
    """Parses the JSON value that begins at a position of a text. Returns the value and the position of its end.

    Raises RowProblem for values that Python's parser accepts, but that are not JSON: NaN, an infinity, a number that is
    too large for a float, or a repeated key. The error has the key. Raises ValueError or RecursionError for other
    invalid text.
    """
    try:
        return _STRICT.raw_decode(text, start)
    except _UnusualJsonError:
        value, end = _LENIENT.raw_decode(text, start)
        raise UnusualValue(next(_find_problems(value, "")), end) from None


class UnusualValue(RowProblem):
    """Raised for NaN, an infinity or a repeated key. `end` is the position after the value that contains it."""

    def __init__(self, message: str, end: int) -> None:
        super().__init__("invalid_json", message)
        self.end = end

    def __reduce__(self) -> tuple[type, tuple[str, int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self), (str(self), self.end)


class _UnusualJsonError(Exception):
    """Raised by the strict decoder, which does not know the key of a value."""


class _Pairs(list[tuple[str, Any]]):
    """The (key, value) pairs of a JSON object. A key may occur twice."""


class _Number(str):
    """The text of a number that is not JSON, or that no float can represent."""


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _UnusualJsonError
    return values


def _read_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise _UnusualJsonError
    return value


def _refuse(constant: str) -> None:
    raise _UnusualJsonError


_STRICT = json.JSONDecoder(object_pairs_hook=_read_object, parse_float=_read_float, parse_constant=_refuse)
_LENIENT = json.JSONDecoder(
    object_pairs_hook=_Pairs,
    parse_float=lambda text: _Number(text) if math.isinf(float(text)) else 0.0,
    parse_constant=_Number,
)
_NAN_AS_NULL = json.JSONDecoder(parse_constant=lambda constant: None)


def _find_problems(value: object, key: str) -> Iterator[str]:
    """Yields a message for every value below `key` that only `_LENIENT` accepts."""
    match value:
        case _Number():
            name = f"key {key!r}" if key else "the row"
            yield f"{name} is {value}, which is not JSON: write a finite number, null, or text"
        case _Pairs():
            seen = set()
            for name, part in value:
                path = f"{key}.{name}" if key else name
                if name in seen:
                    yield f"key {path!r} occurs twice: remove one"
                seen.add(name)
                yield from _find_problems(part, path)
        case list():
            for index, part in enumerate(value):
                yield from _find_problems(part, f"{key}.{index}" if key else str(index))


def to_json_columns(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns columns whose values are all JSON values.

    Dates, times and UUIDs become text (ISO 8601), decimals become numbers, and bytes become text if they are UTF-8. All
    other values, such as images and NaN in a table, become null.

    Raises RowProblem if a column contains text with an unpaired surrogate, or cannot be written as JSON.
    """
    if not columns:
        return columns
    try:
        text = json.dumps(columns, ensure_ascii=False, default=to_json_value)
        text.encode()
        return _NAN_AS_NULL.decode(text)
    except UnicodeEncodeError as error:
        raise RowProblem("invalid_utf8", "a column is not UTF-8 text, or has an unpaired surrogate") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RowProblem("invalid_json", f"a column cannot be written as JSON ({error}); remove it") from error


def to_json_value(value: object) -> object:
    """Returns the JSON value of a value that `json` does not support. `to_json_columns` describes the conversion."""
    match value:
        case date() | time():
            return value.isoformat()
        case timedelta() | UUID():
            return str(value)
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return None
        case _:
            return None
