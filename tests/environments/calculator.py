"""Tools and rewards of tests."""

import asyncio
import os
import time
from typing import Annotated, Any, Literal

from pydantic import Field


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number,
            which may be negative.

    Returns:
        The sum.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "done"


def lookup(key: str, table: dict[str, str]) -> str:
    """Reads a value of the row.

    Args:
        key: The key.
        table: The values.
    """
    return table[key]


def typed(
    unit: Literal["m", "km"], values: list[float], limit: Annotated[int, Field(ge=1)] | None = None
) -> dict[str, Any]:
    """Has several types."""
    return {"unit": unit, "sum": sum(values), "limit": limit}


class Unprintable:
    def __repr__(self) -> str:
        raise OSError

    __str__ = __repr__


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def misbehave(kind: str) -> Any:
    """Misbehaves."""
    if kind == "exit":
        os._exit(3)
    if kind == "print":
        while True:
            print("x" * 1000)  # noqa: T201 - the misbehavior
    if kind == "system_exit":
        raise SystemExit
    if kind == "memory":
        raise MemoryError
    values = {"long": "x" * 100_000, "surrogate": "\udcff", "bytes": b"\xff", "nan": float("nan"), "none": None}
    if kind in values:
        return values[kind]
    return {"unprintable": Unprintable, "circular": circular}[kind]()


def score(response: str, answer: str, num_calls: int) -> float:
    return float(response.strip() == answer) - 0.1 * num_calls


async def is_answer(response: str, answer: str, bonus: float = 0.0) -> float:
    return float(response.strip() == answer) + bonus


def invalid(response: str) -> float:
    return float("nan")


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Has no type hint."""
    return a


def variadic(*values: int) -> int:
    """Has no names."""
    return sum(values)


def no_schema(value: Unprintable) -> int:
    """Has a type without JSON schema."""
    return 0


def unresolved(value: "Missing") -> int:  # type: ignore[name-defined] # noqa: F821
    """Has an unknown type."""
    return 0
