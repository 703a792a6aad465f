"""Implements `flowrl replay`: runs a recorded step again, and prints whether its results are identical."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.run_folder import write_json
from flowrl.checkpoints.saver import package_versions
from flowrl.checkpoints.table_files import read_columns
from flowrl.config import CheckFailed, RunConfig, UserError
from flowrl.data.console import make_console, round_pair
from flowrl.data.folders.private_folder import create_folder
from flowrl.report.value_diff import Tolerance, changed_values, first_difference
from flowrl.rewards.row_scorer import CALLS
from flowrl.run.checks.file_checks import find_path_problems
from flowrl.run.replay.call_log import TABLES
from flowrl.run.replay.recording import Recording, StepResults, changed_sources, describe_machine
from flowrl.run.replay.replayed_run import Replay, ReplayedRun
from flowrl.run.replay.step_debugger import StepDebugger, is_quit

ROUNDING = Tolerance(relative=1e-3, floor=1e-3)
"""Accepted differences if the recorded step used several ranks or sharding, and the replay runs one rank without
sharding.
"""

RESULT = "replay.json"
"""File in the folder of `--output` with the result of the comparison."""


@dataclass(frozen=True)
class Compared:
    """Result of the comparison of a set of values, such as all metrics."""

    name: str
    count: int
    """Number of compared values."""
    differences: tuple[str, ...]
    """One message per value that differs, in order."""


def replay_step(
    recording: Recording,
    config: RunConfig,
    train: Callable[..., object],  # (config, start) -> object, with the config class of the recipe
    *,
    overrides: Sequence[str] = (),
    backend: str = "inline",
    output: Path | None = None,
    debugger: StepDebugger | None = None,
    console: Console | None = None,
) -> None:
    """Runs a recorded step with the training function of its recipe, and prints the comparison with the recording.

    Args:
        recording: the recorded step.
        config: the config of the recording, possibly with other settings.
        train: the training function of the recipe.
        overrides: the settings that differ from the recording, as `KEY=VALUE`. With overrides, differences of the
            results are printed, but are not an error.
        backend: `inline` runs one rank of each role in this process. `ray` starts the processes of the placement.
        output: new folder for the columns that calls return and for `replay.json`. None keeps no files.
        debugger: stops the step, and opens after an exception in the frame that raised it. None uses no debugger.
        console: receives the output. None prints to the standard output.
    Raises:
        CheckFailed: the step fails as in the run, or the user has quit the debugger. Without overrides, also if the
            results differ, or if the step succeeds but failed in the run.
        UserError: an input is missing, the output folder exists, or the recipe does not run the step.
        Exception: any exception of the step that the run did not raise.
    """
    console = console or make_console()
    _check_inputs(recording, config)
    with ExitStack() as resources:
        folder = _open_output(output, resources)
        notify = lambda text: console.print(text, markup=False, highlight=False)  # noqa: E731 (one expression)
        replay = Replay(recording, folder, backend, notify)
        if debugger is not None:
            replay.before_step = debugger.start
        try:
            train(config, start=lambda config: ReplayedRun(config, replay))
        except Exception as error:  # the step may fail as in the run, or the debugger inspects the exception
            if is_quit(error):
                raise CheckFailed("the debugger has ended the replay, so nothing is compared") from None
            if debugger is not None:
                debugger.inspect_error(error)
            if (original := recording.values["error"]) is None or f"{type(error).__name__}: {error}" != original:
                raise
            raise CheckFailed(f"the step fails as in the run: {error}") from None
        if replay.results is None:
            raise UserError(
                f"the recipe has not run step {recording.step}: its loop must iterate over run.rollouts or run.batches"
            )
        if (failure := recording.values["error"]) is not None:
            if output is not None:
                _write_result(output, recording, overrides, [], _describe_changes(recording), is_identical=False)
            if not overrides:
                raise CheckFailed(f"the step succeeds, but in the run it failed ({failure})")
            notify(f"step {recording.step} succeeds with {' '.join(overrides)}; in the run it failed ({failure})")
            return
        _report(recording, replay.results, overrides, backend, output, console)


def _check_inputs(recording: Recording, config: RunConfig) -> None:
    """Raises UserError if a file that the config names is missing."""
    problems = list(find_path_problems(config))
    if problems:
        started = recording.values["working_folder"]
        hint = "" if started == os.getcwd() else f" (the run was started in {started}: start the replay there)"
        raise UserError(f"{problems[0]}{hint}")


def _open_output(output: Path | None, resources: ExitStack) -> Path:
    if output is None:
        return resources.enter_context(create_folder("replay"))
    try:
        output.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--output: {output} exists: choose a new folder") from None
    except OSError as error:
        raise UserError(f"--output: cannot write {output} ({error.strerror}): choose another folder") from error
    return output.absolute()


def _report(
    recording: Recording,
    results: StepResults,
    overrides: Sequence[str],
    backend: str,
    output: Path | None,
    console: Console,
) -> None:
    """Prints the comparison, and writes it to the output folder.

    Raises CheckFailed if results differ although `overrides` is empty.
    """
    inexactness = recording.describe_inexactness() if backend == "inline" else ""
    tolerance = ROUNDING if inexactness else None
    recorded = StepResults(recording.values, recording.path)
    compared = compare_steps(recorded, results, tolerance)
    notes = _describe_changes(recording)
    not_replayed = _not_replayed(recording)
    first = next((part.differences[0] for part in compared if part.differences), None)
    if output is not None:
        is_identical = first is None and not inexactness
        _write_result(output, recording, overrides, compared, notes, is_identical=is_identical)
    console.print(_table(compared, "identical" if not inexactness else f"within {ROUNDING.relative:g}"))
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if not_replayed:
        console.print(f"not replayed: {', '.join(not_replayed)}", markup=False, highlight=False)
    if inexactness:
        console.print(
            f"relative differences up to {ROUNDING.relative:g} are accepted, because {inexactness}, and the inline "
            "backend runs one rank without sharding: --backend ray computes as the run did",
            markup=False,
            highlight=False,
        )
    if first is not None and overrides:
        _print_changes(recording, results, overrides, tolerance, console)
        return
    if first is not None:
        raise CheckFailed(f"step {recording.step} differs from the run; first difference: {first}")
    verdict = f"equal up to rounding ({ROUNDING.relative:g})" if inexactness else "bitwise identical to the run"
    console.print(f"step {recording.step} is {verdict}", markup=False, highlight=False)


def _write_result(
    output: Path,
    recording: Recording,
    overrides: Sequence[str],
    compared: Sequence[Compared],
    changes: Sequence[str],
    *,
    is_identical: bool,
) -> None:
    """Writes the comparison to `replay.json`. `compared` is empty for a step that failed in the run, and `changes` is
    the result of `_describe_changes`.
    """
    result = {
        "step": recording.step,
        "error_in_run": recording.values["error"],
        "is_identical": is_identical,
        "compared": [{"name": part.name, "count": part.count, "differences": part.differences} for part in compared],
        "overrides": list(overrides),
        "changes": list(changes),
        "metrics_not_replayed": _not_replayed(recording),
    }
    write_json(output / RESULT, result)


def _not_replayed(recording: Recording) -> list[str]:
    """Returns the names of the metrics that the run logged, but that a replay does not compute, such as times."""
    return sorted(set(recording.values["logged"]) - set(recording.values["metrics"]))


def _table(compared: Sequence[Compared], same: str) -> Table:
    table = Table("results", "compared", same, "first difference")
    for part in compared:
        first = part.differences[0] if part.differences else ""
        table.add_row(part.name, str(part.count), str(part.count - len(part.differences)), Text(first))
    return table


def _print_changes(
    recording: Recording,
    results: StepResults,
    overrides: Sequence[str],
    tolerance: Tolerance | None,
    console: Console,
) -> None:
    """Prints a table of the metrics that differ, with their recorded and replayed values, and a summary."""
    recorded, replayed = recording.values["metrics"], results.values["metrics"]
    changed = changed_values(recorded, replayed, tolerance)
    if changed:
        table = Table("metric", "recorded", "replayed")
        for name, *values in changed:
            rounded = round_pair(*values, min_digits=6)
            table.add_row(Text(name), *("-" if value is None else str(value) for value in rounded))
        console.print(table)
    verdict = "no metric differs from the run, but calls or states differ"
    if changed:
        verdict = f"{len(changed)} of {len({**recorded, **replayed})} metrics differ from the run"
    console.print(f"step {recording.step} with {' '.join(overrides)}: {verdict}", markup=False, highlight=False)


def _describe_changes(recording: Recording) -> list[str]:
    """Returns a line per changed version or hardware property, and one line with all changed source files."""
    values, notes = recording.values, []
    current = {**package_versions(), **describe_machine()}
    for name, before in {**values["versions"], **values["machine"]}.items():
        if current.get(name) != before:
            notes.append(f"{name} was {before} in the run and is now {current.get(name, 'missing')}")
    if changed := changed_sources(values["sources"]):
        notes.append(f"source files changed since the recording: {', '.join(changed)}")
    return notes


# Comparison of a replayed step with its recording.


def compare_steps(recorded: StepResults, replayed: StepResults, tolerance: Tolerance | None) -> list[Compared]:
    """Compares calls, metrics, states of roles and states of driver objects, in this order.

    Without a tolerance, all values must be bitwise identical. A tolerance applies to numbers, to the L2 norm of the
    difference of a float column, and to the difference of the L2 norms of state tensors. Checksums are then ignored,
    but integer columns must be identical.
    """
    first, second = recorded.values, replayed.values
    compared = [_compare_calls(recorded, replayed, tolerance)]
    compared.append(_compare_values("metrics", first["metrics"], second["metrics"], tolerance))
    for role, states in first["states"].items():
        other = second["states"].get(role, [])
        if tolerance is None or len(states) == len(other):
            compared.append(_compare_values(f"state of {role}", _by_tensor(states), _by_tensor(other), tolerance))
        else:  # the sharding differs, so a rank's norm has no counterpart
            compared.append(_compare_values(f"state of {role}", _full_norms(states), _full_norms(other), tolerance))
    compared.append(_compare_values("state of the driver", first["objects"], second["objects"], tolerance))
    return compared


def _by_tensor(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns name -> value of all tensors and counters. With several ranks, the name contains the rank."""
    suffix = (lambda rank: "") if len(states) == 1 else (lambda rank: f" of rank {rank}")
    return {
        f"{name}{suffix(rank)}": value
        for rank, state in enumerate(states)
        for name, value in {**state["tensors"], **state["counters"]}.items()
    }


def _full_norms(states: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns name -> L2 norm of the full tensor. Each rank has a shard or a copy of the tensor."""
    norms = {}
    for name, checksum in states[0]["tensors"].items():
        own = [state["tensors"].get(name, {"norm": 0.0}) for state in states]
        is_copied = all(other == checksum for other in own)
        norms[name] = checksum["norm"] if is_copied else math.sqrt(sum(other["norm"] ** 2 for other in own))
    return norms


def _compare_values(
    name: str, recorded: Mapping[str, Any], replayed: Mapping[str, Any], tolerance: Tolerance | None
) -> Compared:
    names = list(dict.fromkeys((*recorded, *replayed)))
    problems = (
        (key, first_difference(recorded.get(key, "missing"), replayed.get(key, "missing"), tolerance)) for key in names
    )
    return Compared(name, len(names), tuple(f"{key} {problem}" for key, problem in problems if problem))


def _compare_calls(recorded: StepResults, replayed: StepResults, tolerance: Tolerance | None) -> Compared:
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
        difference = _compare_call(call, other, tables, tolerance)
        if difference:
            problems.append(f"{name} {difference}")
    if not problems and len(second) > len(first):
        extra = second[len(first)]
        problems.append(f"call {len(first) + 1}, {extra['role']}.{extra['method']}, is new")
    return Compared("calls", len(first), tuple(problems))


def _compare_call(call: Any, other: Any, tables: Sequence[Path], tolerance: Tolerance | None) -> str:
    if difference := first_difference(call["arguments"], other["arguments"], tolerance):
        return f"argument {difference}"
    if call["has_table"] and other["has_table"]:
        return compare_tables(tables[0], tables[1], tolerance)
    difference = first_difference(call["result"], other["result"], tolerance)
    return f"result {difference}" if difference else ""


def compare_tables(recorded: Path, replayed: Path, tolerance: Tolerance | None) -> str:
    """Returns a text with the first column that differs between two files of `write_table`, and with its difference.
    Returns an empty string if all columns are equal.
    """
    first, second = read_columns(recorded), read_columns(replayed)
    for name, column in first.items():
        if name not in second:
            return f"column {name} is missing"
        if difference := _compare_columns(_without_times(name, column), _without_times(name, second[name]), tolerance):
            return f"column {name} {difference}"
    added = [name for name in second if name not in first]
    return f"column {added[0]} is new" if added else ""


def _without_times(name: str, column: torch.Tensor | list) -> torch.Tensor | list:
    """Returns a column without the durations of reward calls, which differ from run to run."""
    if name != CALLS or isinstance(column, torch.Tensor):
        return column
    return [{reward: {**call, "seconds": None} for reward, call in row.items()} for row in column]


def _compare_columns(first: torch.Tensor | list, second: torch.Tensor | list, tolerance: Tolerance | None) -> str:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return "" if first == second else "has different objects"
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return f"was {first.dtype} {list(first.shape)} and is now {second.dtype} {list(second.shape)}"
    is_different = (_bytes(first) != _bytes(second)).any(-1)
    if not is_different.any():
        return ""
    gap = (first.double() - second.double()).abs()
    limit = (
        None if tolerance is None or not first.is_floating_point() else tolerance.limit(float(first.double().norm()))
    )
    if limit is not None and gap.norm() <= limit:
        return ""
    largest = gap[~gap.isnan()].max() if bool((~gap.isnan()).any()) else float("nan")
    return f"differs in {int(is_different.sum())} of {gap.numel()} values, by up to {largest:.3g}"


def _bytes(column: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each value, [N, size of a value]."""
    return column.contiguous().reshape(-1, 1).view(torch.uint8)
