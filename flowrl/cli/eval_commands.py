"""`flowrl eval`: evaluates models on tasks, and compares them."""

import argparse
from pathlib import Path

from flowrl.cli.command_parser import Commands, natural, positive_count, temperature
from flowrl.cli.imports import add_working_folder
from flowrl.cli.inference_commands import add_parallel_sizes
from flowrl.config import ConfigError, ReplicaSizes


def add_eval(commands: Commands) -> None:
    """Adds `eval` to the parser of the `flowrl` command."""
    parser = commands.add_parser("eval", help="evaluate models on tasks, and compare them in one table")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="MODEL|KEY=VALUE",
        help="model folders, Hub names, run folders or checkpoints; and settings, such as rollout.top_p=0.9",
    )
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="a data file, a task of reasoning-gym, or lm-eval:NAME; can be repeated; default: the run's held-out data",
    )
    parser.add_argument("--reward", metavar="MODULE:FUNCTION", help="reward of data files; default: that of the run")
    parser.add_argument("--samples", type=positive_count, metavar="K", help="number of responses per prompt")
    parser.add_argument("--temperature", type=temperature, metavar="T", help="sampling temperature; 0 is greedy")
    parser.add_argument("--seed", type=natural, metavar="N", help="seed of the sampled tokens")
    parser.add_argument("--limit", type=positive_count, metavar="N", help="use only the first N prompts of each task")
    parser.add_argument("--engine", metavar="NAME", help="rollout engine: hf, vllm or module:Class")
    parser.add_argument(
        "--step", type=natural, metavar="N", help="checkpoint of each run folder; default: the trained model"
    )
    parser.add_argument(
        "--devices", type=positive_count, metavar="N", help="number of devices that generate; default: tp times pp"
    )
    add_parallel_sizes(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers, settings and scores as JSON")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the responses as JSON lines")
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> None:
    settings = [word for word in arguments.overrides if "=" in word and not Path(word).exists()]
    models = [word for word in arguments.overrides if word not in settings]
    if not models:
        raise ConfigError("name at least one model: flowrl eval MODEL, where MODEL is a model, a run or a checkpoint")
    add_working_folder()

    from flowrl.inference.model_source import check_model  # noqa: PLC0415 (huggingface_hub)

    for model in models:
        check_model(model)

    # imported here, after the models are checked, because these imports load torch and take seconds
    from flowrl.data.console import make_console  # noqa: PLC0415
    from flowrl.inference.evaluation.evaluate_models import evaluate_models  # noqa: PLC0415
    from flowrl.inference.evaluation.planned_tasks import EvaluationArguments  # noqa: PLC0415

    replica = ReplicaSizes(arguments.tp, arguments.pp)
    evaluation = EvaluationArguments(
        arguments.task,
        arguments.reward,
        arguments.samples,
        arguments.temperature,
        arguments.seed,
        arguments.limit,
        arguments.engine,
        replica,
        settings,
    )
    evaluate_models(
        models,
        evaluation,
        console=make_console(),
        step=arguments.step,
        num_devices=arguments.devices or replica.num_devices,
        output=arguments.output,
        rows=arguments.rows,
    )
