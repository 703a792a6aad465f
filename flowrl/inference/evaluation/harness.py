"""Evaluates a model on tasks of the library lm-eval. Needs the extra `lm-eval`."""

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowrl.config import ONE_DEVICE, UserError
from flowrl.config.user_errors import convert_errors
from flowrl.inference.evaluation.model_scores import TaskScores
from flowrl.inference.evaluation.planned_tasks import HARNESS, EvaluationArguments
from flowrl.inference.model_source import ModelSource
from flowrl.run.evaluation import PromptScores

_TOLERANCE = 1e-9
"""Relative tolerance between the mean over documents and the library's value. A larger difference shows that the
metric is not a mean over documents.
"""

Result = Mapping[str, Any]  # Any: the library's values


def check_harness(tasks: Sequence[str], arguments: EvaluationArguments) -> None:
    """Checks tasks of lm-eval before the evaluation.

    Raises UserError if lm-eval is not installed or does not have a task, or if the number of samples, the temperature
    or several devices per engine are set.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--task {HARNESS}{tasks[0]} needs the library lm-eval, which is not installed: pip install "
            f"'flowrl[lm-eval]'"
        )
    for option, value in (("--samples", arguments.samples), ("--temperature", arguments.temperature)):
        if value is not None:
            raise UserError(
                f"{option} is {value:g}, but tasks of lm-eval have sampling settings of their own: omit it, or "
                f"evaluate these tasks separately"
            )
    if arguments.replica != ONE_DEVICE:
        raise UserError(
            f"an engine with {arguments.replica} is set, but tasks of lm-eval use one device: omit --tp and --pp, or "
            f"evaluate these tasks separately"
        )
    names = [task for task in tasks if not Path(task).is_file()]
    unknown = [name for name in names if name.endswith((".yaml", ".yml")) or "/" in name]
    if names and not unknown:
        known = set(_task_manager(tasks).all_tasks)
        unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"--task {HARNESS}{unknown[0]} is neither a task of the installed lm-eval nor a YAML file of a task: see "
            f"`lm-eval ls tasks` for the names"
        )


def evaluate_harness(
    tasks: Sequence[str], source: ModelSource, arguments: EvaluationArguments
) -> dict[str, TaskScores]:
    """Returns the scores of a model by task and metric, such as `arc_easy/acc`.

    A metric that is a mean over documents has one score per document. Another metric, such as perplexity, has only its
    value, and its scores are NaN.

    Args:
        tasks: names of tasks or groups, or paths of YAML files of tasks.
        source: the model.
        arguments: limit, seed and engine.
    Raises: UserError if the data of a task cannot be loaded.
    """
    from lm_eval.evaluator import simple_evaluate  # noqa: PLC0415 (an optional library)

    from flowrl.inference.evaluation.harness_model import HarnessModel  # noqa: PLC0415 (see above)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, seed = _task_manager(tasks), arguments.seed or 0

    def describe(error: BaseException) -> UserError:
        return UserError(f"the tasks {', '.join(tasks)} of lm-eval cannot be loaded: {error}")

    with convert_errors(describe):  # loading runs code of tasks and of `datasets`
        loaded = manager.load(list(tasks))
    results = simple_evaluate(
        model=HarnessModel(source, engine=arguments.engine or "hf", seed=seed),
        tasks=list(loaded["tasks"].values()),
        limit=arguments.limit,
        bootstrap_iters=0,
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    assert results is not None, "the library returns None only on other ranks"
    values: dict[str, Any] = dict(results)  # Any: the library's values
    return {
        f"{task}/{_metric_name(metric, filter_name)}": _read_scores(values["samples"][task], metric, filter_name, value)
        for task, own in values["results"].items()
        if task in values["samples"]
        for metric, filter_name, value in _metrics(own)
    }


def _task_manager(tasks: Sequence[str]) -> Any:  # Any: a class of the library
    """Returns the task index of lm-eval. If all tasks are YAML files, the index omits lm-eval's own tasks."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 (an optional library)

    return TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))


def _metrics(result: Result) -> list[tuple[str, str, float]]:
    """Returns (metric, filter, value) of the results of a task, whose keys are `metric,filter`."""
    metrics = []
    for key, value in result.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            metrics.append((metric, filter_name, float(value)))
    return metrics


def _metric_name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _read_scores(samples: Sequence[Result], metric: str, filter_name: str, value: float) -> TaskScores:
    """Returns the scores per document for one metric and filter.

    All scores are NaN if their mean differs from `value`, the metric that lm-eval reports for the task.
    """
    own = sorted((sample for sample in samples if sample["filter"] == filter_name), key=lambda row: row["doc_id"])
    numbers = [sample.get(metric) for sample in own]
    scores = [float(number) if isinstance(number, int | float) else math.nan for number in numbers]
    mean = math.fsum(scores) / len(scores) if scores else math.nan
    if not abs(mean - value) <= _TOLERANCE * max(1.0, abs(value)):
        scores = [math.nan] * len(own)
    documents = [int(sample["doc_id"]) for sample in own]
    rows = [
        {
            "prompt_id": document,
            "prompt": _first_argument(sample),
            "response": sample["filtered_resps"],
            "answer": sample["target"],
            "score": None if math.isnan(score) else score,
        }
        for document, sample, score in zip(documents, own, scores, strict=True)
    ]
    scores_PN = torch.tensor(scores, dtype=torch.float64)[:, None]
    prompts = PromptScores(scores_PN, documents, [None] * len(own))
    return TaskScores({"accuracy": value}, [row["prompt"] for row in rows], prompts, 1.0, rows)


def _first_argument(sample: Result) -> str:
    """Returns the context of the first request of a document."""
    arguments = sample["arguments"]
    first = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    text = next(iter(first.values())) if isinstance(first, Mapping) else first[0]
    return str(text)
