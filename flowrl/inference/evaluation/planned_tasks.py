"""Converts the arguments of `flowrl eval` to settings of evaluations: one config per reward, with its prompts."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config import (
    ONE_DEVICE,
    ConfigError,
    EvaluationRunConfig,
    ReplicaSizes,
    RolloutRunConfig,
    UserError,
    load,
    load_recorded,
    recipe_class,
)
from flowrl.data.folders.input_paths import download_model_file
from flowrl.data.reading.generated_rows import find_generator_problem
from flowrl.engines.models.loading import stored_dtype
from flowrl.inference.model_source import ModelSource
from flowrl.memory.model_fit import read_max_positions

HARNESS = "lm-eval:"
"""Prefix of the tasks of the library lm-eval."""

GENERATED = "reasoning-gym:"
"""Optional prefix of the tasks of reasoning-gym."""

NUM_GENERATED_ROWS = 200
"""Number of generated prompts of a task of reasoning-gym, unless --limit sets it."""

_MAX_PROMPT_TOKENS, _MAX_RESPONSE_TOKENS = 2048, 1024
"""Default token limits of a model without a run. A model with a shorter context has smaller limits."""

_GENERATED_REWARD = {"function": "flowrl.rewards.reasoning_gym:score"}

Settings = dict[str, Any]  # Any: JSON values of settings


@dataclass(frozen=True)
class EvaluationArguments:
    """Arguments of `flowrl eval` that change the results. None selects the value of the run, or a default."""

    tasks: Sequence[str] = ()
    """Data files, tasks of reasoning-gym, and tasks of lm-eval with the prefix `lm-eval:`."""
    reward: str | None = None
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None
    limit: int | None = None
    engine: str | None = None
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the devices that one engine uses."""
    settings: Sequence[str] = ()
    """Settings, as `KEY=VALUE`."""


def find_run(source: str) -> Path | None:
    """Returns the run folder of a path that is a run folder or a checkpoint in it. None for a model without a run."""
    path = Path(source)
    candidates = [path, *(path.parents[1:2] if path.parent.name == "checkpoints" else ())]
    return next((folder for folder in candidates if (folder / "config.yaml").is_file()), None)


def read_run_settings(run: Path) -> Settings | None:
    """Returns the settings that the evaluations of a run use. None: the run has no rollouts, as with SFT.

    Raises ConfigError if the config of the run cannot be read.
    """
    path = run / "config.yaml"
    schema = recipe_class(path)
    if not issubclass(schema, RolloutRunConfig):
        return None
    config = load_recorded(path, schema)
    values = config.model_dump(mode="json")
    reward = next((name for name, value in config if value is config.reward_settings and value is not None), None)
    kept = ("data", "rollout", "evaluation", "environment", "seed", "threads")
    placement = {"device": config.placement.device, "pools": {"main": [1]}, "roles": {"rollout": "main"}}
    settings = {name: values[name] for name in kept} | {"placement": placement}
    if reward is not None:
        settings["reward"] = values[reward]
    # `order: curriculum` and `difficulty` need the success of training prompts, which an evaluation does not have.
    settings["data"] |= {"order": "file", "difficulty": {}}
    return settings | {"actor": {"model": values["actor"]["model"]}}


def plan_evaluations(
    arguments: EvaluationArguments, source: ModelSource, settings: Settings | None
) -> list[EvaluationRunConfig]:
    """Returns the configs for the evaluation of a model. Tasks with the same reward are `data.tests` of one config.

    Args:
        arguments: the arguments of the command. Tasks of lm-eval are ignored.
        source: the evaluated model.
        settings: the result of `read_run_settings`. None selects defaults.
    Raises:
        UserError: a task is unknown or has no reward, or a setting is invalid.
    """
    base = _default_settings(source) if settings is None else settings
    tasks = [task for task in arguments.tasks if not task.startswith(HARNESS)]
    if not tasks and arguments.tasks:
        return []
    if not tasks:
        _check_data(base, arguments)
        _check_reward(base, arguments, "the held-out data")
        return [_build(base, arguments, source)]
    files: dict[str, Settings] = {}
    generated: dict[str, Settings] = {}
    for task in tasks:
        name, data, is_generated = _read_task(task, arguments)
        if name in files or name in generated:
            raise UserError(
                f"--task {task} has the same name as another task, {name}: rename the file, or evaluate it separately"
            )
        (generated if is_generated else files)[name] = data
    planned = []
    if files:
        _check_reward(base, arguments, f"--task {tasks[0]}")
        planned.append(_build(_with_tests(base, files), arguments, source))
    if generated:
        own = _with_tests(base, generated) | {"reward": _GENERATED_REWARD, "environment": None}
        planned.append(_build(own, arguments, source, can_set_reward=False))
    return planned


def _read_task(task: str, arguments: EvaluationArguments) -> tuple[str, Settings, bool]:
    """Returns the name of a task, the settings of its data, and whether reasoning-gym generates it."""
    if not task.startswith(GENERATED) and (path := Path(task)).exists():
        return re.sub(r"[^\w.-]", "_", path.name.split(".")[0]) or "task", {"path": task}, False
    name = task.removeprefix(GENERATED)
    if problem := find_generator_problem():
        raise UserError(f"--task {task} is not a file, and {problem}: correct the path, or install the library")
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415 (takes a second)

    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"--task {task} is neither a file nor a task of reasoning-gym{meant}: write the path of a "
            f"data file, a name such as leg_counting, or {HARNESS}NAME for a task of lm-eval"
        )
    rows = arguments.limit or NUM_GENERATED_ROWS
    return name, {"reasoning_gym": {name: 1.0}, "rows": rows, "split": "test", "system": "default"}, True


def _without_replaced_settings(data: Settings, arguments: EvaluationArguments) -> Settings:
    """Returns `data` without those settings of single held-out sets that the arguments of the command replace."""
    replaced: Settings = {"every": None}
    if arguments.limit is not None:
        replaced["rows"] = None
    if arguments.samples is not None or arguments.temperature is not None:
        replaced["evaluation"] = None
    tests = {
        name: {**held_out, **replaced} if isinstance(held_out, Mapping) else held_out
        for name, held_out in data.get("tests", {}).items()
    }
    return data | {"tests": tests}


def _check_data(base: Settings, arguments: EvaluationArguments) -> None:
    is_set = any(setting.startswith("data") for setting in arguments.settings)
    if not (is_set or base["data"].get("test") or base["data"].get("tests")):
        raise UserError(
            "there is nothing to evaluate: name a data file with --task, or pass a run with held-out data as the first "
            "model"
        )


def _check_reward(base: Settings, arguments: EvaluationArguments, data: str) -> None:
    is_set = any(setting.startswith(("reward", "environment")) for setting in arguments.settings)
    if arguments.reward is None and not is_set and base.get("reward") is None and base.get("environment") is None:
        raise UserError(
            f"{data} has no reward: name a function with --reward module:function, or pass the run whose "
            f"reward scores it as the first model"
        )


def _with_tests(base: Settings, tests: Mapping[str, Settings]) -> Settings:
    """Returns settings whose held-out data are only `tests`: name -> data file."""
    own = {"test": None, "tests": {name: [file] for name, file in tests.items()}, "evaluation_rows": None}
    return base | {"data": base["data"] | own}


def _default_settings(source: ModelSource) -> Settings:
    """Returns the settings for a model without a run. The limits of lengths fit the model."""
    settings = download_model_file(source.path, "config.json")
    positions = None if settings is None else read_max_positions(settings.parent)
    limit = positions or _MAX_PROMPT_TOKENS + _MAX_RESPONSE_TOKENS
    response = min(_MAX_RESPONSE_TOKENS, max(1, limit // 3))
    dtype = stored_dtype(source.path) if source.path.is_dir() else "float32"
    return {
        "data": {"max_prompt_tokens": min(_MAX_PROMPT_TOKENS, max(1, limit - response))},
        "rollout": {"max_response_tokens": response},
        "actor": {"model": {"path": str(source.path), "dtype": dtype, "dropout": 0}},
    }


def _build(
    base: Settings, arguments: EvaluationArguments, source: ModelSource, *, can_set_reward: bool = True
) -> EvaluationRunConfig:
    """Returns the config of a model with the arguments of the command. Without `can_set_reward`, ignores `--reward`."""
    base = base | {"data": _without_replaced_settings(base["data"], arguments)}
    model = base["actor"]["model"] | {"path": str(source.path), "dropout": 0}
    model["tokenizer"] = None if source.tokenizer is None else str(source.tokenizer)
    base = base | {"actor": base["actor"] | {"model": model}}
    settings = [f"{name}={json.dumps(value)}" for name, value in base.items()]
    options = {
        "evaluation.samples": arguments.samples,
        "evaluation.temperature": arguments.temperature,
        "seed": arguments.seed,
        "data.evaluation_rows": arguments.limit,
        "rollout.engine": arguments.engine,
    }
    settings += [f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None]
    if arguments.engine is not None and arguments.engine != "vllm":
        settings.append("rollout.vllm=null")
    if arguments.reward is not None and can_set_reward:
        settings += [f"reward={json.dumps({'function': arguments.reward})}", "environment=null"]
    try:
        return load(None, [*settings, *arguments.settings], EvaluationRunConfig)
    except ConfigError as error:
        raise ConfigError(_shorten(str(error), base)) from error


def _shorten(message: str, base: Settings) -> str:
    """Shortens an error message. Replaces each section of the run's settings, which may be long, by its name."""
    for name, value in base.items():
        message = message.replace(f"{name}={json.dumps(value)}", f"{name} of the run")
    return message
