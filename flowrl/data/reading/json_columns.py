"""Converts the columns of a row to values that JSON can represent, so that raw and prepared rows are equal."""

import json
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from flowrl.data.reading.row_problems import RowProblem


def to_json_columns(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns columns whose values are all JSON values.

    Dates, times and UUIDs become text (ISO 8601), decimals become numbers, and bytes become text if they are UTF-8. All
    other values, such as images, become null.

    Raises RowProblem if a column contains text with an unpaired surrogate, or cannot be written as JSON.
    """
    if not columns:
        return columns
    try:
        text = json.dumps(columns, ensure_ascii=False, default=to_json_value)
        text.encode()
        return json.loads(text)
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
