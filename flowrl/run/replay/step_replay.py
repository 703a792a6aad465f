"""Implements `flowrl replay`: runs a recorded step again, and prints whether its results are identical."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.run_folder import write_json
from flowrl.checkpoints.saver import package_versions
from flowrl.config import CheckFailed, RunConfig, UserError
from flowrl.data.console import make_console, round_pair
from flowrl.data.folders.private_folder import create_folder
from flowrl.run.checks.file_checks import find_path_problems
from flowrl.run.replay.comparison import BOUND, Compared, StepResults, changed_metrics, compare_steps
from flowrl.run.replay.recording import Recording, changed_sources, describe_machine
from flowrl.run.replay.replayed_run import Replay, ReplayedRun
from flowrl.run.replay.step_debugger import StepDebugger, is_quit

RESULT = "replay.json"
"""File in the folder of `--output` with the result of the comparison."""


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
        config: its config, possibly with other settings.
        train: the training function of its recipe.
        overrides: the settings that differ from the recording, as `KEY=VALUE`. With overrides, different results are
            printed and are no error.
        backend: `inline` runs one rank of each role in this process, `ray` the processes of the placement.
        output: new folder for the columns that calls return and for `replay.json`. None: they are not kept.
        debugger: stops the step. After an exception, it opens in the frame that raised the exception.
        console: where to print. None: the standard output.
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
        except Exception as error:
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

    Raises CheckFailed if results differ without overrides.
    """
    inexactness = recording.describe_inexactness() if backend == "inline" else ""
    recorded = StepResults(recording.values, recording.path)
    compared = compare_steps(recorded, results, is_exact=not inexactness)
    notes = _describe_changes(recording)
    not_replayed = _not_replayed(recording)
    first = next((part.differences[0] for part in compared if part.differences), None)
    if output is not None:
        is_identical = first is None and not inexactness
        _write_result(output, recording, overrides, compared, notes, is_identical=is_identical)
    console.print(_table(compared, "identical" if not inexactness else f"within {BOUND:g}"))
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if not_replayed:
        console.print(f"not replayed: {', '.join(not_replayed)}", markup=False, highlight=False)
    if inexactness:
        console.print(
            f"relative differences up to {BOUND:g} are accepted, because {inexactness}, and the replay with one rank "
            "adds sums in a different order: --backend ray replays all ranks",
            markup=False,
            highlight=False,
        )
    if first is not None and overrides:
        _print_changes(recording, results, overrides, is_exact=not inexactness, console=console)
        return
    if first is not None:
        raise CheckFailed(f"step {recording.step} differs from the run; first difference: {first}")
    verdict = f"equal up to rounding ({BOUND:g})" if inexactness else "bitwise identical to the run"
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
    recording: Recording, results: StepResults, overrides: Sequence[str], *, is_exact: bool, console: Console
) -> None:
    """Prints a table of the metrics that differ, with their recorded and replayed values, and a summary."""
    recorded, replayed = recording.values["metrics"], results.values["metrics"]
    changed = changed_metrics(recorded, replayed, is_exact=is_exact)
    if changed:
        table = Table("metric", "recorded", "replayed")
        for name, values in changed.items():
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
