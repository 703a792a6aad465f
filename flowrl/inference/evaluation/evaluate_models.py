"""Evaluates several models on the same tasks, prints a table, and writes the files of `flowrl eval`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flowrl.checkpoints.inputs import combined_checksum, input_checksums
from flowrl.config import EvaluationRunConfig, ReplicaSizes, UserError
from flowrl.data.folders.input_paths import find_model_file
from flowrl.inference.evaluation.evaluation_table import check_writable, render_results, write_results, write_rows
from flowrl.inference.evaluation.harness import check_harness, evaluate_harness
from flowrl.inference.evaluation.model_comparison import TaskResult, compare, prompt_records
from flowrl.inference.evaluation.model_scores import TaskScores, check_evaluation, evaluate_model
from flowrl.inference.evaluation.planned_tasks import (
    HARNESS,
    EvaluationArguments,
    Settings,
    find_run,
    plan_evaluations,
    read_run_settings,
)
from flowrl.inference.model_source import ModelSource, resolve_model
from flowrl.run.monitoring.failure_watch import FailureWatch

_UNNAMED = "test"
"""Task name of `data.test`, the held-out data without a name."""


def evaluate_models(
    models: Sequence[str],
    arguments: EvaluationArguments,
    *,
    console: Console,
    step: int | None = None,
    num_devices: int = 1,
    output: Path | None = None,
    rows: Path | None = None,
) -> list[TaskResult]:
    """Evaluates models, prints a table of the results, and returns them.

    The settings come from the first model that belongs to a run with rollouts. If there is none, defaults apply. All
    models and settings are checked before the first evaluation.

    Args:
        models: model folders, Hub names, run folders or checkpoint folders. The first model is the baseline.
        arguments: tasks and settings.
        console: where to print.
        step: step of the checkpoint of each run folder. None: the trained model.
        num_devices: number of devices that generate responses, a multiple of the devices of `arguments.replica`.
        output: JSON file for all numbers. None: no file.
        rows: file of JSON lines for all responses. None: no file.
    Raises:
        UserError: a model, a task, a file or a setting is invalid, or more rewards failed than `max_failure_rate`
            allows. In the last case, the table and the files contain the results up to this model.
        WorkerError: a worker failed. The table and the files have the models that were evaluated before.
    """
    for option, path in (("--output", output), ("--rows", rows)):
        if path is not None:
            check_writable(option, path)
    settings = _find_settings(models, console)
    sources = _resolve(models, step)
    planned = {name: plan_evaluations(arguments, source, settings) for name, source in sources.items()}
    harness_tasks = [task.removeprefix(HARNESS) for task in arguments.tasks if task.startswith(HARNESS)]
    if harness_tasks:
        check_harness(harness_tasks, arguments)
    for config in chain.from_iterable(planned.values()):
        check_evaluation(config, num_devices, arguments.replica)
    scores: dict[str, dict[str, TaskScores]] = {}
    results: list[TaskResult] = []
    notify = partial(_print_text, console)
    try:
        for i, (name, source) in enumerate(sources.items(), start=1):
            notify(f"evaluating {name} ({i} of {len(sources)})")
            evaluated = [_evaluate(config, num_devices, arguments.replica, notify) for config in planned[name]]
            if harness_tasks:
                evaluated.append(evaluate_harness(harness_tasks, source, arguments))
            scores[name] = {task: own for tasks in evaluated for task, own in tasks.items()}
            _check_failures(name, planned[name], evaluated, notify)
    finally:  # an error, or Ctrl-C, does not lose the models that were evaluated before
        if scores:
            results = compare(scores)
            console.print(render_results(results))
            if output is not None:
                write_results(output, results, _details(sources, next(iter(planned.values())), arguments, scores))
            if rows is not None:
                of_tasks = ((name, task, result) for name, own in scores.items() for task, result in own.items())
                shown = [{"model": name, "task": task, **row} for name, task, result in of_tasks for row in result.rows]
                write_rows(rows, shown)
    return results


def _print_text(console: Console, text: str) -> None:
    console.print(Text(text))  # a name may contain markup


def _evaluate(
    config: EvaluationRunConfig, num_devices: int, replica: ReplicaSizes, notify: Callable[[str], None]
) -> dict[str, TaskScores]:
    scores = evaluate_model(config, num_devices=num_devices, replica=replica, notify=notify)
    return {name or _UNNAMED: own for name, own in scores.items()}


def _check_failures(
    model: str,
    configs: Sequence[EvaluationRunConfig],
    evaluated: Sequence[Mapping[str, TaskScores]],
    notify: Callable[[str], None],
) -> None:
    """Notifies the user if rewards failed. Raises UserError if the share of failed rewards is above `max_failure_rate`.

    `evaluated` contains task -> scores for each config. The scores of lm-eval follow, and are ignored, because lm-eval
    has no rewards.
    """
    for config, scores in zip(configs, evaluated, strict=False):
        watch = FailureWatch(config, notify)
        for task, own in scores.items():
            rows = [{**row, "set": None} for row in own.rows]
            watch.check_evaluation(f"of {model} to {task}", own.metrics, rows)
        if watch.error is not None:
            raise UserError(watch.error)


def _find_settings(models: Sequence[str], console: Console) -> Settings | None:
    """Returns the settings of the first model that belongs to a run with rollouts, or None."""
    for model in models:
        run = find_run(model)
        settings = None if run is None else read_run_settings(run)
        if settings is not None:
            console.print(Text(f"using the settings of the run {run}"))
            return settings
    return None


def _resolve(models: Sequence[str], step: int | None) -> dict[str, ModelSource]:
    """Returns name in the table -> model. If several models have the same name, their paths are used as names.

    Raises UserError if a model is listed twice.
    """
    if repeated := next((model for i, model in enumerate(models) if model in models[:i]), None):
        raise UserError(f"{repeated} is named twice: name each model once")
    has_run = any(_is_run(model) for model in models)
    resolved = {model: resolve_model(model, step=step if _is_run(model) or not has_run else None) for model in models}
    names = [source.name for source in resolved.values()]
    return {
        source.name if names.count(source.name) == 1 else model.rstrip("/"): source
        for model, source in resolved.items()
    }


def _is_run(model: str) -> bool:
    return find_run(model) == Path(model)


def _details(
    sources: Mapping[str, ModelSource],
    configs: Sequence[EvaluationRunConfig],
    arguments: EvaluationArguments,
    scores: Mapping[str, Mapping[str, TaskScores]],
) -> dict[str, Any]:  # Any: values of JSON
    """Returns the entries of the JSON file besides the results, for the models in `scores`."""
    included = {"data", "rollout", "evaluation", "environment", "reward", "seed"}
    return {
        "models": [
            {
                "name": name,
                "kind": source.kind,
                "path": str(source.path),
                "adapter": None if source.adapter is None else str(source.adapter),
                "weights": _weights_checksum(source.path),
            }
            for name, source in sources.items()
            if name in scores
        ],
        "tasks": list(arguments.tasks),
        "settings": [config.model_dump(mode="json", include=included) for config in configs],
        "inputs": [{key: _checksum(own) for key, own in input_checksums(config).items()} for config in configs],
        "prompts": {
            name: {task: prompt_records(result) for task, result in own.items()} for name, own in scores.items()
        },
    }


def _weights_checksum(model: Path) -> dict[str, int] | None:
    """Returns the checksum of the weights of a folder or of a Hub model that has been downloaded."""
    settings = find_model_file(model, "config.json")
    weights = [] if settings is None else sorted(settings.parent.glob("*.safetensors"))
    return _checksum(combined_checksum(weights)) if weights else None


def _checksum(value: Any) -> dict[str, int] | None:  # Any: a FileChecksum, or None
    return None if value is None else {"bytes": value.size, "crc32": value.crc32}
