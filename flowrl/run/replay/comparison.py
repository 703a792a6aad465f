"""Compares a replayed step with its recording: calls in order, their columns and results, metrics, and final states."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.run.replay.call_log import TABLES, Described
from flowrl.run.replay.table_files import read_columns

BOUND = 1e-3
"""Largest accepted relative difference of values that are computed with a different number of ranks."""

_MAX_SHOWN = 60
"""Largest number of characters of a value in a message."""


@dataclass(frozen=True)
class Compared:
    """Result of the comparison of a set of values, such as all metrics."""

    name: str
    count: int
    """Number of compared values."""
    differences: tuple[str, ...]
    """One message per value that differs, in order."""


@dataclass(frozen=True)
class StepResults:
    """Results of a step: the values of `step.json`, and the folder with the columns that calls returned."""

    values: Mapping[str, Any]  # Any: JSON values
    folder: Path


def compare_steps(recorded: StepResults, replayed: StepResults, *, is_exact: bool) -> list[Compared]:
    """Compares calls, metrics, states of roles and states of driver objects, in this order.

    With `is_exact`, all values must be bitwise identical. Otherwise numbers may differ by `BOUND`, relative to their
    magnitude. For a float column, the bound applies to the L2 norm of its difference, and for a state tensor to the
    difference of the L2 norms. Integer columns must be identical. Checksums are ignored.
    """
    first, second = recorded.values, replayed.values
    compared = [_compare_calls(recorded, replayed, is_exact)]
    compared.append(_compare_values("metrics", first["metrics"], second["metrics"], is_exact))
    for role, states in first["states"].items():
        other = second["states"].get(role, [])
        if is_exact or len(states) == len(other):
            compared.append(_compare_values(f"state of {role}", _by_tensor(states), _by_tensor(other), is_exact))
        else:  # the sharding differs, so a rank's norm has no counterpart
            compared.append(_compare_values(f"state of {role}", _full_norms(states), _full_norms(other), is_exact))
    compared.append(_compare_values("state of the driver", first["objects"], second["objects"], is_exact))
    return compared


def changed_metrics(
    recorded: Mapping[str, float], replayed: Mapping[str, float], *, is_exact: bool
) -> dict[str, tuple[float | None, float | None]]:
    """Maps each metric that differs to its recorded and its replayed value. None: the step did not log the metric.

    `is_exact` is that of `compare_steps`.
    """
    values = {name: (recorded.get(name), replayed.get(name)) for name in {**recorded, **replayed}}
    return {name: pair for name, pair in values.items() if first_difference(*pair, is_exact)}


def _by_tensor(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Maps the name of a tensor or counter, with the rank if there are several, to its value."""
    suffix = (lambda rank: "") if len(states) == 1 else (lambda rank: f" of rank {rank}")
    return {
        f"{name}{suffix(rank)}": value
        for rank, state in enumerate(states)
        for name, value in {**state["tensors"], **state["counters"]}.items()
    }


def _full_norms(states: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Maps the name of a tensor to the norm of the full tensor. Each rank has a shard or a copy of the tensor."""
    norms = {}
    for name, checksum in states[0]["tensors"].items():
        own = [state["tensors"].get(name, {"norm": 0.0}) for state in states]
        is_copied = all(other == checksum for other in own)
        norms[name] = checksum["norm"] if is_copied else math.sqrt(sum(other["norm"] ** 2 for other in own))
    return norms


def _compare_values(
    name: str, recorded: Mapping[str, Described], replayed: Mapping[str, Described], is_exact: bool
) -> Compared:
    names = [*recorded, *(key for key in replayed if key not in recorded)]
    problems = (
        (key, first_difference(recorded.get(key, "missing"), replayed.get(key, "missing"), is_exact)) for key in names
    )
    return Compared(name, len(names), tuple(f"{key} {problem}" for key, problem in problems if problem))


def first_difference(recorded: Described, replayed: Described, is_exact: bool = True) -> str:
    """Returns the first difference of two values as text, such as `was 1 and is now 2`, or an empty string."""
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        names = [*recorded, *(name for name in replayed if name not in recorded)]
        return _first(names, lambda name: (recorded.get(name, "missing"), replayed.get(name, "missing")), is_exact)
    if isinstance(recorded, list) and isinstance(replayed, list) and len(recorded) == len(replayed):
        return _first(range(len(recorded)), lambda index: (recorded[index], replayed[index]), is_exact)
    if json.dumps(recorded) == json.dumps(replayed):
        return ""
    if not is_exact and isinstance(recorded, int | float) and isinstance(replayed, int | float):
        return "" if is_close(recorded, replayed) else f"was {recorded} and is now {replayed}"
    return f"was {_shorten(recorded)} and is now {_shorten(replayed)}"


def _first(keys: Iterable[Any], pair: Callable[[Any], tuple[Described, Described]], is_exact: bool) -> str:
    for key in keys:
        if key == "crc32" and not is_exact:
            continue
        if difference := first_difference(*pair(key), is_exact):
            return difference if key in ("crc32", "result") else f"{key} {difference}"
    return ""


def is_close(first: float, second: float) -> bool:
    """Returns whether two numbers differ by at most `BOUND`, relative to the larger magnitude or to 1e-3."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return abs(first - second) <= BOUND * max(abs(first), abs(second), 1e-3)


def _shorten(value: Described) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# Calls.


def _compare_calls(recorded: StepResults, replayed: StepResults, is_exact: bool) -> Compared:
    first, second = recorded.values["calls"], replayed.values["calls"]
    problems: list[str] = []
    for index, call in enumerate(first):
        name = f"call {index + 1} of {len(first)}, {call['role']}.{call['method']},"
        if index >= len(second):
            problems.append(f"{name} is missing")
            break
        other = second[index]
        if (call["role"], call["method"]) != (other["role"], other["method"]):
            problems.append(f"{name} is now {other['role']}.{other['method']}")
            break  # later calls do not correspond
        tables = [results.folder / TABLES / f"{index + 1:04d}.safetensors" for results in (recorded, replayed)]
        difference = _compare_call(call, other, tables, is_exact)
        if difference:
            problems.append(f"{name} {difference}")
    if not problems and len(second) > len(first):
        extra = second[len(first)]
        problems.append(f"call {len(first) + 1}, {extra['role']}.{extra['method']}, is new")
    return Compared("calls", len(first), tuple(problems))


def _compare_call(call: Described, other: Described, tables: Sequence[Path], is_exact: bool) -> str:
    if difference := first_difference(call["arguments"], other["arguments"], is_exact):
        return f"argument {difference}"
    if call["has_table"] and other["has_table"]:
        return compare_tables(*tables, is_exact=is_exact)
    difference = first_difference(call["result"], other["result"], is_exact)
    return f"result {difference}" if difference else ""


def compare_tables(recorded: Path, replayed: Path, *, is_exact: bool) -> str:
    """Returns the first column that differs in two files of `write_table` and its difference, or an empty string."""
    first, second = read_columns(recorded), read_columns(replayed)
    for name, column in first.items():
        if name not in second:
            return f"column {name} is missing"
        if difference := _compare_columns(column, second[name], is_exact):
            return f"column {name} {difference}"
    added = [name for name in second if name not in first]
    return f"column {added[0]} is new" if added else ""


def _compare_columns(first: torch.Tensor | list, second: torch.Tensor | list, is_exact: bool) -> str:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return "" if first == second else "has different objects"
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return f"was {first.dtype} {list(first.shape)} and is now {second.dtype} {list(second.shape)}"
    is_different = (_bytes(first) != _bytes(second)).any(-1)
    if not is_different.any():
        return ""
    gap = (first.double() - second.double()).abs()
    if not is_exact and first.is_floating_point() and gap.norm() <= BOUND * max(float(first.double().norm()), 1e-3):
        return ""
    largest = gap[~gap.isnan()].max() if bool((~gap.isnan()).any()) else float("nan")
    return f"differs in {int(is_different.sum())} of {gap.numel()} values, by up to {largest:.3g}"


def _bytes(column: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each value, [N, size of a value]."""
    return column.contiguous().reshape(-1, 1).view(torch.uint8)
