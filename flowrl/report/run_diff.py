"""Compares two runs: settings, inputs, versions, and the first step and call at which their metrics diverge."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.run_files import Record, read_config, read_inputs, read_metrics, read_system
from flowrl.checkpoints.run_folder import RunFolder
from flowrl.data.console import printable, round_pair
from flowrl.report import usage
from flowrl.report.rollout_log import Kind, MissingStepError, Row, read_rows, saved_steps
from flowrl.report.value_diff import Change, Tolerance, changed_values, compare_settings, first_difference, shorten

_IGNORED_SETTINGS = ("output", "resume")
"""Settings that are not compared, because they do not change results."""

_NONDETERMINISTIC = (
    "seconds",
    "elapsed_s",
    "tokens_per_s",
    "memory_mb",
    "wait_data_s",
    "wait_weights_s",
    "environment/restarts",
)
"""Metrics of time, memory and repeated work, which differ even between identical runs."""


@dataclass(frozen=True)
class CallStage:
    """A call of a step, and the values that it determines."""

    call: str
    row_columns: tuple[str, ...] = ()
    token_columns: tuple[str, ...] = ()
    """Lists of the column `tokens` of a row."""
    metrics: tuple[str, ...] = ()
    """Names of metrics. A name that ends with `/` or `_` stands for all metrics whose names begin with it."""

    def determines(self, metric: str) -> bool:
        return any(metric == name or (name.endswith(("/", "_")) and metric.startswith(name)) for name in self.metrics)


STAGES = (
    CallStage(
        "the order of prompts",
        ("prompt_id", "sample", "prompt", "answer"),
        (),
        (
            "staleness",
            "staleness_",
            "buffer_depth",
            "running_groups",
            "waiting_groups",
            "admitted_groups",
            "trained_groups",
        ),
    ),
    CallStage("the weight transfer", metrics=("weights_",)),
    CallStage(
        "rollout.generate",
        ("response", "finish_reason", "response_length", "environment_length", "version", "newest_version"),
        ("ids", "mask", "rollout_logprobs", "versions"),
        (
            "response_length",
            "response_tokens",
            "environment_length",
            "truncated_fraction",
            "repetition",
            "turns",
            "environment/",
        ),
    ),
    CallStage(
        "reward.score",
        ("rewards", "score", "reward_failures"),
        (),
        ("reward", "reward_max", "reward_min", "reward_failed_fraction", "reward_truncated_fraction", "rewards/"),
    ),
    CallStage(
        "the selection of groups",
        metrics=("dropped_", "sampling_rounds", "reward_selected", "selected_fraction", "kl_bound"),
    ),
    CallStage(
        "actor.logprobs", (), ("logprobs", "ratios"), ("rollout_gap", "rollout_gap_max", "mismatch/", "correction/")
    ),
    CallStage("reference.logprobs", (), ("ref_logprobs",), ("kl",)),
    CallStage("critic.values", (), ("values",)),
    CallStage(
        "advantages.compute",
        ("other_scores", "advantage"),
        ("advantages",),
        ("reward_shaping", "equal_scores_fraction", "kl_coef", "explained_variance"),
    ),
    CallStage("critic.update", metrics=("critic/",)),
    CallStage("actor.update", metrics=("actor/",)),
    CallStage("reward.update", metrics=("reward/",)),
    CallStage(
        "the evaluation",
        metrics=(
            "accuracy",
            "accuracy/",
            "accuracy_",
            "agreement",
            "agreement/",
            "validation_loss",
            "validation_loss/",
            "evaluation/",
        ),
    ),
)
"""Calls of a step in their order. The first call with different values is reported."""


@dataclass(frozen=True)
class Divergence:
    """The first step at which two runs differ."""

    step: int
    call: str
    """First call of the step whose values differ."""
    values: Sequence[Change]
    """Name and both values of each difference that was found. A missing value is None."""


@dataclass(frozen=True)
class CommonScores:
    """Mean scores of two evaluations over the responses whose reward failed in neither of them."""

    step: int
    name: str
    """Name of the set of prompts; empty for `data.test`."""
    num_rows: int
    """Number of responses that both runs have saved."""
    num_scored: int
    """Number of responses that have a score in both runs."""
    means: tuple[float, float]
    """Mean score in each run over the responses that have a score in both. NaN if there are none."""


@dataclass(frozen=True)
class RunDiff:
    """The differences of two runs."""

    names: tuple[str, str]
    settings: Sequence[Change] = ()
    inputs: Sequence[Change] = ()
    versions: Sequence[Change] = ()
    divergence: Divergence | None = None
    num_steps: int = 0
    """Number of training steps that both runs have logged."""
    num_equal_steps: int = 0
    """Number of training steps with equal metrics."""
    results: Sequence[Change] = ()
    """Name and both values of the metrics that differ in the last common step, largest relative difference first."""
    evaluations: Sequence[CommonScores] = ()
    """Scores in the last common evaluation of each set of prompts. Has only sets in which a reward failed."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of a missing comparison (`inputs`, `versions` or `metrics`) -> why it is missing."""

    @property
    def is_equal(self) -> bool:
        return not (self.settings or self.inputs or self.versions) and self.divergence is None


def compare_runs(first: Path, second: Path, *, tolerance: float = 0.0) -> RunDiff:
    """Compares the folders of two runs.

    Two numbers are equal if they differ by at most `tolerance` times their larger magnitude, or times 1 if both
    magnitudes are below 1. Metrics of time and memory are not compared. Raises UserError if a folder is not a run
    folder.
    """
    configs = [read_config(folder) for folder in (first, second)]
    folders = (RunFolder(first), RunFolder(second))
    missing: dict[str, str] = {}
    settings = [
        (entry["key"], *entry["values"])
        for entry in compare_settings(configs)
        if entry["differs"] and entry["key"] not in _IGNORED_SETTINGS
    ]
    inputs = _compare_json("inputs", [read_inputs(folder.path) for folder in folders], missing)
    systems = [read_system(folder.path) for folder in folders]
    versions = _compare_json("versions", [system and system["versions"] for system in systems], missing)
    records = [{int(record["step"]): record for record in read_metrics(folder.metrics)} for folder in folders]
    common = sorted(records[0].keys() & records[1].keys())
    if not common:
        missing["metrics"] = "the runs have no step in common"
    accepted = Tolerance(tolerance)
    differing = [step for step in common if _different_metrics(records[0][step], records[1][step], accepted)]
    divergence = _find_divergence(folders, records, common, differing[0] if differing else None, accepted)
    last = _different_metrics(records[0][common[-1]], records[1][common[-1]], accepted) if common else []
    trained = [step for step in common if step]
    return RunDiff(
        names=(str(first), str(second)),
        settings=settings,
        inputs=inputs,
        versions=versions,
        divergence=divergence,
        num_steps=len(trained),
        num_equal_steps=len([step for step in trained if step not in differing]),
        results=sorted(last, key=_size_of_difference, reverse=True),
        evaluations=_compare_evaluations(folders, common),
        missing=missing,
    )


def _compare_evaluations(folders: tuple[RunFolder, RunFolder], common: Sequence[int]) -> list[CommonScores]:
    """Compares scores in the last common evaluation of each set of prompts. Omits sets without failed rewards."""
    compared: dict[str, CommonScores | None] = {}
    for step in sorted(_steps_of_rows(folders, "evaluation") & {*common}, reverse=True):
        try:
            first, second = (_rows_by_set(read_rows(folder.rollouts, "evaluation", step)) for folder in folders)
        except MissingStepError:
            continue
        for name in (first.keys() & second.keys()) - compared.keys():
            compared[name] = _compare_scores(step, name, first[name], second[name])
    return [scores for _, scores in sorted(compared.items()) if scores is not None]


def _rows_by_set(rows: Sequence[Row]) -> dict[str, dict[tuple, Row]]:
    """Returns name of the set -> (prompt, sample) -> row."""
    sets: defaultdict[str, dict[tuple, Row]] = defaultdict(dict)
    for row in rows:
        sets[row.get("set") or ""][row["prompt_id"], row["prompt"], row.get("sample")] = row
    return sets


def _compare_scores(
    step: int, name: str, first: Mapping[tuple, Row], second: Mapping[tuple, Row]
) -> CommonScores | None:
    pairs = [(first[key], second[key]) for key in first if key in second]
    scored = [pair for pair in pairs if all(map(_has_score, pair))]
    if len(scored) == len(pairs) or not any(_has_score(row) for pair in pairs for row in pair):
        return None
    one, other = (
        math.fsum(pair[run]["score"] for pair in scored) / len(scored) if scored else math.nan for run in (0, 1)
    )
    return CommonScores(step, name, len(pairs), len(scored), (one, other))


def _has_score(row: Row) -> bool:
    # Saved rows of other versions have the score 0 if a reward failed.
    return row.get("score") is not None and not row.get("reward_failures")


def _compare_json(name: str, values: Sequence[Mapping[str, Any] | None], missing: dict[str, str]) -> list[Change]:
    """Returns the keys whose values differ, with both values. Adds a reason to `missing` if a run lacks the values."""
    first, second = values
    if first is None or second is None:
        missing[name] = "a run was written by an earlier version of flowrl, which did not record them"
        return []
    return changed_values(first, second, None)


def _different_metrics(first: Record, second: Record, tolerance: Tolerance) -> list[Change]:
    """Returns the metrics of a step that differ, except those of time and memory."""
    return [change for change in changed_values(first, second, tolerance) if not is_nondeterministic(change[0])]


def is_nondeterministic(metric: str) -> bool:
    """Returns whether a metric differs even between identical runs."""
    return metric in _NONDETERMINISTIC or metric.startswith(("idle_", usage.PREFIX)) or metric.endswith("/seconds")


def _find_divergence(
    folders: tuple[RunFolder, RunFolder],
    records: Sequence[Mapping[int, Record]],
    common: Sequence[int],
    metrics_step: int | None,
    tolerance: Tolerance,
) -> Divergence | None:
    """Returns the first step whose metrics or saved rows differ, or None.

    `metrics_step` is the first step whose metrics differ, or None. Rows may differ in an earlier step.
    """
    steps = [step for step in common if metrics_step is None or step <= metrics_step]
    kinds: tuple[Kind, ...] = ("training", "evaluation")
    saved = {kind: _steps_of_rows(folders, kind) for kind in kinds}
    for step in steps:
        differences = _different_metrics(records[0][step], records[1][step], tolerance) if step == metrics_step else []
        rows: list[tuple[Kind, list[Row], list[Row]]] = []
        for kind in kinds:
            if step not in saved[kind]:
                continue
            try:
                first, second = (read_rows(folder.rollouts, kind, step) for folder in folders)
                rows.append((kind, first, second))
            except MissingStepError:
                continue  # `report.rollouts.max_mb` of an active run has removed the file
        if (divergent := _first_divergent_call(differences, rows, tolerance)) is not None:
            call, values = divergent
            return Divergence(step, call, values)
    return None


def _steps_of_rows(folders: tuple[RunFolder, RunFolder], kind: Kind) -> set[int]:
    first, second = ({*saved_steps(folder.rollouts, kind)} for folder in folders)
    return first & second


def _first_divergent_call(
    metrics: Sequence[Change], rows: Sequence[tuple[Kind, list[Row], list[Row]]], tolerance: Tolerance
) -> tuple[str, list[Change]] | None:
    """Returns the first call of a step with different values, and these values. None without differences."""
    for stage in STAGES:
        values = [entry for entry in metrics if stage.determines(entry[0])]
        for kind, first, second in rows:
            if (kind == "evaluation") == (stage.call == "the evaluation"):
                values += _different_rows(stage, kind, first, second, tolerance)
        if values:
            return stage.call, values
    return ("an unknown call", list(metrics)) if metrics else None


_EVALUATED = ("prompt_id", "response", "rewards", "score")
"""Columns of evaluation rows that are compared."""


def _different_rows(
    stage: CallStage, kind: Kind, first: list[Row], second: list[Row], tolerance: Tolerance
) -> list[Change]:
    """Returns the different values of the first row that differs. Compares only rows that both runs have saved."""
    names = _EVALUATED if kind == "evaluation" else stage.row_columns
    others = {row["row"]: row for row in second}
    for one in (row for row in first if row["row"] in others):
        other = others[one["row"]]
        values = [
            (f"{kind} row {one['row']}, {name}", one.get(name), other.get(name))
            for name in names
            if first_difference(one.get(name), other.get(name), tolerance)
        ]
        tokens = (one.get("tokens") or {}, other.get("tokens") or {})
        for name in stage.token_columns:
            pairs = list(zip(tokens[0].get(name, ()), tokens[1].get(name, ()), strict=False))
            index = next((i for i, pair in enumerate(pairs) if first_difference(*pair, tolerance)), None)
            if index is not None:
                values.append((f"{kind} row {one['row']}, {name} of token {index}", *pairs[index]))
        if values:
            return values
    if kind == "evaluation" and len(first) != len(second):  # evaluations save all their rows
        return [(f"number of {kind} rows", len(first), len(second))]
    return []


def _size_of_difference(entry: Change) -> float:
    """Returns the relative difference of two numbers. NaN differs most, and a metric that one run lacks least."""
    _, one, other = entry
    if one is None or other is None:
        return -1.0
    if not isinstance(one, int | float) or not isinstance(other, int | float) or math.isnan(one) or math.isnan(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


# Tables for a terminal.

_MAX_ROWS = 12


def print_diff(diff: RunDiff, console: Console) -> None:
    """Prints the differences, the first divergence, and why a comparison is missing."""
    for name, title, entries in (
        ("settings", "Settings", diff.settings),
        ("inputs", "Inputs (size and CRC-32)", diff.inputs),
        ("versions", "Versions", diff.versions),
    ):
        if entries:
            console.print(_table(title, diff.names, entries, num_shown=len(entries)))
        elif name not in diff.missing:
            console.print(f"{title}: equal")
    for name, reason in diff.missing.items():
        console.print(Text(f"{name.capitalize()}: not compared, because {reason}"))
    if diff.num_steps:
        console.print(f"Metrics: {diff.num_equal_steps} of {diff.num_steps} common steps are equal")
    for scores in diff.evaluations:
        console.print(Text(_describe_scores(scores)))
    if diff.divergence is None:
        if diff.num_steps:
            console.print("No step diverges.")
        return
    title = f"First divergence: step {diff.divergence.step}, {diff.divergence.call}"
    console.print(_table(title, diff.names, diff.divergence.values, num_shown=_MAX_ROWS))
    console.print(_table("Last common step, largest differences", diff.names, diff.results, num_shown=_MAX_ROWS))


def _describe_scores(scores: CommonScores) -> str:
    name = f" of the set {scores.name}" if scores.name else ""
    one, other = scores.means
    return (
        f"Evaluation{name} in step {scores.step}: rewards failed. Mean score of the {scores.num_scored} of "
        f"{scores.num_rows} responses with a score in both runs: {one:.3f} and {other:.3f}"
    )


def _table(title: str, names: tuple[str, str], entries: Sequence[Change], *, num_shown: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for name, first, second in entries[:num_shown]:
        table.add_row(Text(printable(name)), *map(_cell, round_pair(first, second)))
    if len(entries) > num_shown:
        table.add_row(f"{len(entries) - num_shown} more", "", "")
    return table


def _cell(value: Any) -> Text:  # Any: a value of JSON
    if value is None:
        return Text("none", style="dim")
    return Text(printable(shorten(value)))
