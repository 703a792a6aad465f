"""The `flowrl` command, and the exit codes and error messages of every program of this project."""

import argparse
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar, cast

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.resume import RunComplete
from flowrl.checkpoints.run_folder import is_disk_full
from flowrl.cli.command_parser import CommandParser, Commands, natural, positive, positive_count, seconds
from flowrl.cli.data_commands import add_data
from flowrl.cli.eval_commands import add_eval
from flowrl.cli.imports import (
    add_working_folder,
    collection_paused,
    find_recipe,
    included_recipes,
    training_function,
)
from flowrl.cli.inference_commands import add_inference
from flowrl.cli.run_folder_commands import add_diff, add_replay, add_report, add_show
from flowrl.config import (
    CheckFailed,
    ConfigError,
    ExportConfig,
    Placement,
    RolloutRunConfig,
    RunConfig,
    UserError,
    load_located,
    loading,
    recipe_class,
)
from flowrl.config.source import read
from flowrl.controller.errors import WorkerError
from flowrl.controller.placement.cpu_threads import count_usable_cpus, read_requested_threads
from flowrl.controller.placement.inventory import local_gpu_names, local_inventory
from flowrl.controller.placement.plan import Plan, plan
from flowrl.controller.placement.plan_table import render_plan, render_threads
from flowrl.data.console import LogFormatter, indent_lines, write_printable
from flowrl.devices.device_rates import GPUS, DeviceRates, find_rates
from flowrl.memory.device_settings import render_settings
from flowrl.memory.memory_estimate import explain_unknown_sizes
from flowrl.memory.memory_table import render_memory
from flowrl.report.chrome_trace import TraceError, read_trace
from flowrl.report.trace import loop_events
from flowrl.run.checks.check_list import Need, check_start, run_checks
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.interrupt import Interrupted, raise_on_ending_signals
from flowrl.run.restarts import with_restarts
from flowrl.run.updates import describe_batches, describe_planned_updates
from flowrl.schedules.schedule_plan import check_routes, render_graph

RecipeConfig = TypeVar("RecipeConfig", bound=RunConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: `sys.argv[1:]`) and returns the exit code."""
    # The functions that add commands accept any parser of argparse.
    parser = cast(
        "argparse.ArgumentParser",
        CommandParser(prog="flowrl", description="Reinforcement learning of language models."),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_config(commands)
    _add_check(commands)
    _add_plan(commands)
    _add_trace(commands)
    add_show(commands)
    add_report(commands)
    add_diff(commands)
    _add_checkpoints(commands)
    _add_export(commands)
    _add_doctor(commands)
    _add_stubs(commands)
    add_eval(commands)
    add_data(commands)
    add_inference(commands)
    add_replay(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments, rest = parser.parse_known_args(argv)
    # argparse does not accept key=value arguments after an option, so they are added to the overrides here.
    if rest and "overrides" not in arguments:
        commands.choices[argv[0]].error(f"unexpected argument {rest[0]!r}")
    if rest:
        arguments.overrides += rest
    return exit_code(lambda: arguments.run(arguments))


def exit_code(program: Callable[[], object]) -> int:
    """Runs `program` and returns its exit code. Prints errors to stderr without the driver's traceback.

    Exit codes:
        0: the program has succeeded, or its run is already complete.
        1: a worker or a check has failed.
        2: a `UserError` was raised, the disk is full, a path is too long, or a file is in the place of a folder.
        130, 143 or 129: the program has received SIGINT, SIGTERM or SIGHUP.
        141: the reader of the output, such as `head`, has ended.
    Other exceptions are bugs and propagate.
    """
    try:
        with _warnings_on_stderr(), raise_on_ending_signals():
            program()
    except UserError as error:
        write_printable(f"error: {indent_lines(str(error))}\n", sys.stderr)
        return 2
    except (WorkerError, CheckFailed) as error:  # an error of a worker ends with its traceback
        write_printable(f"error: {error}\n", sys.stderr)
        return 1
    except RunComplete as complete:
        write_printable(f"{complete}\n")
    except Interrupted as ended:
        try:
            write_printable(f"{ended}\n", sys.stderr)
            sys.stdout.flush()
        except OSError:  # the terminal was closed
            _discard_output(sys.stdout, sys.stderr)
        return ended.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        _discard_output(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if (problem := _describe_file_error(error)) is None:
            raise
        write_printable(f"error: {problem}\n", sys.stderr)
        return 2
    return 0


def _describe_file_error(error: OSError) -> str | None:
    """Returns a message for an error that the user can fix: a full disk, a path that is too long, or a file in the
    place of a folder. None for other errors.
    """
    if is_disk_full(error):
        location = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{location} ({error.strerror}): free space, or set output to another disk; saved "
            f"checkpoints are complete, and resume=auto resumes from the newest"
        )
    if error.errno == errno.ENAMETOOLONG:
        return f"the path {error.filename or 'of a file'} is too long for the file system: use shorter names"
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and error.filename:
        return f"{error.filename} is a file, or is in a file, but must be a folder: move or remove the file"
    return None


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """During the block, writes warnings to stderr as `warning: ...`. Applies to all loggers that have no handler."""
    before, logging.lastResort = logging.lastResort, _StderrHandler(logging.WARNING)
    logging.lastResort.setFormatter(LogFormatter("%(level)s: %(message)s"))
    try:
        yield
    finally:
        logging.lastResort = before


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # the terminal was closed
            sys.stderr.write(f"{self.format(record)}\n")


def _discard_output(*streams: TextIO) -> None:
    """Discards the buffers of streams, because Python would write them at exit, and exit with code 120 on failure."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_recipe(
    schema: type[RecipeConfig], train: Callable[[RecipeConfig], object] | str, argv: Sequence[str] | None = None
) -> int:
    """Runs the command line of a recipe, `CONFIG [KEY=VALUE ...] [--address HOST:PORT]`, and returns its exit code.

    Loads the config and calls `train`, again after process failures if `restarts` allows it. If `train` is a name,
    `module:function`, the module is imported after the config has been checked.
    """
    specification = sys.modules["__main__"].__spec__  # None if the recipe was started as a file
    prog = None if specification is None else f"python -m {specification.name}"  # the default of Python 3.14
    parser = CommandParser(prog=prog, description=(schema.__doc__ or "").strip())
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster to join, as address=HOST:PORT")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_intermixed_args(argv)
    address = [] if arguments.address is None else [f"address={arguments.address}"]

    def program() -> None:
        with loading(arguments.config, [*arguments.overrides, *address], schema) as config:
            checked = check_start(config)
            with_restarts(_import_train(train) if isinstance(train, str) else train, config, checked)

    return exit_code(program)


def _import_train(name: str) -> Callable[[RunConfig], object]:
    # Unlike import_function, leaves an exception of the recipe's own imports as it is, with its traceback.
    module, _, function = name.partition(":")
    with collection_paused():
        return getattr(importlib.import_module(module), function)


def _add_config(commands: Commands) -> None:
    parser = commands.add_parser("config", help="print a commented YAML file with all settings of a recipe")
    printed = parser.add_mutually_exclusive_group(required=True)
    printed.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name, such as grpo, or module:Class")
    printed.add_argument(
        "--reference", action="store_true", help="print a Markdown page with the settings of all included recipes"
    )
    parser.set_defaults(run=_config)


def _config(arguments: argparse.Namespace) -> None:
    # imported here, because the other commands do not need them
    from flowrl.config.setting_reference import render_reference  # noqa: PLC0415
    from flowrl.config.setting_template import render_template  # noqa: PLC0415

    if arguments.reference:
        sys.stdout.write(render_reference(included_recipes(), REFERENCE_COMMAND))
    else:
        sys.stdout.write(render_template(find_recipe(arguments.recipe)))


REFERENCE_COMMAND = "flowrl config --reference > docs/config.md"
"""Command that writes the page of all settings."""


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser("check", help="check everything that a run needs, without training")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> None:
    schema = _run_config(arguments.config)
    config, locate = load_located(arguments.config, arguments.overrides, schema)

    with collection_paused():
        from flowrl.run.checks.check_report import check_config  # noqa: PLC0415 (torch, after the config is validated)

    check_config(config, partial(training_function, schema), locate)


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="print the devices, data flow and memory of every role, without starting anything",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a recipe's YAML file, or one of placement/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.add_argument("--devices", type=_counts, metavar="N[,N...]", help="devices per node; default: this machine's")
    parser.add_argument(
        "--gpu", type=str.lower, choices=GPUS, help="GPU to plan for: its memory and its speed; default: this machine's"
    )
    parser.add_argument("--time", action="store_true", help="also estimate the time of a step, and of its phases")
    means = (("prompt", "prompts"), ("response", "responses"))
    for name, noun in means:
        parser.add_argument(
            f"--{name}-tokens",
            type=positive_count,
            metavar="N",
            help=f"mean length of {noun} for --time; default: the limit",
        )
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    if not arguments.time and (arguments.prompt_tokens or arguments.response_tokens):
        raise ConfigError("--prompt-tokens and --response-tokens are lengths for --time: add --time, or remove them")
    if "pools" in read(arguments.config).values:
        if arguments.time or arguments.gpu:
            raise ConfigError(
                f"{arguments.config} is a placement without models: use --gpu and --time with a recipe's file"
            )
        with loading(arguments.config, arguments.overrides, Placement) as placement:
            planned = plan(placement, local_inventory(placement.device, arguments.devices))
            check_routes(placement, planned)
        threads = _describe_threads(planned, is_local=arguments.devices is None)
        details = ""
    else:
        with loading(arguments.config, arguments.overrides, _run_config(arguments.config)) as config:
            config = _with_memory(config, arguments.gpu)
            with collection_paused():  # the memory of a known model is measured with torch and transformers
                run = CheckedRun(config, arguments.devices, gpu=arguments.gpu)
                run = run_checks(run, missing=Need.OUTPUT | Need.START | Need.FILES)
                planned, fitted = run.plan, run.fitted
                time = f"\n{_estimate_time(run, arguments)}\n" if arguments.time else ""
        is_inline = config.backend == "inline"
        threads = _describe_threads(planned, is_local=run.is_local, setting=config.threads, is_inline=is_inline)
        graph = f"\n{render_graph(config, planned)}\n" if isinstance(config, RolloutRunConfig) else ""
        num_ranks = planned.roles["actor"].mesh.dp if "actor" in planned.roles else 1
        sizes = [*describe_batches(config, num_ranks), *describe_planned_updates(config)]
        updates = "".join(f"{line}\n" for line in sizes)
        unknown = "".join(f"{line}\n" for line in explain_unknown_sizes(config))
        settings, memory = render_settings(config, fitted, planned), render_memory(fitted.devices, fitted.budget)
        details = f"{graph}\n{updates}\n{settings}\n\n{memory}\n{unknown}{time}"
    write_printable(f"{render_plan(planned)}\n{threads}\n{details}")


def _with_memory(config: RunConfig, gpu: str | None) -> RunConfig:
    """Returns the config with the memory of a GPU in `GPUS` in place of a null `placement.memory_gb`.

    Raises ConfigError if the placement may have CPUs.
    """
    if gpu is None:
        return config
    placement = config.placement
    if placement.device != "cuda":
        raise ConfigError(f"--gpu is {gpu}, but placement.device is {placement.device}: set placement.device=cuda")
    if placement.memory_gb is None:
        placement = placement.model_copy(update={"memory_gb": GPUS[gpu].memory_gb})
    return config.model_copy(update={"placement": placement})


def _estimate_time(run: CheckedRun, arguments: argparse.Namespace) -> str:
    """Returns the estimated time of a step as text. Raises ConfigError if it cannot be estimated."""
    from flowrl.timing.step_time import assume_lengths, estimate_step, render_time  # noqa: PLC0415 (torch)

    lengths = assume_lengths(run.config, arguments.prompt_tokens, arguments.response_tokens)
    return render_time(estimate_step(run.fitted, run.plan, _find_rates(run, arguments.gpu), lengths))


def _find_rates(run: CheckedRun, gpu: str | None) -> DeviceRates:
    """Returns the rates of the planned GPUs. Raises ConfigError if they are unknown, or if the plan has CPUs."""
    if run.plan.kind != "cuda":
        raise ConfigError(
            "--time estimates a step on GPUs, but the placement has CPUs: set placement.device=cuda, and add --gpu and "
            "--devices with the kind and number of GPUs"
        )
    names = local_gpu_names() if run.is_local else []
    rates = GPUS[gpu] if gpu else find_rates(names[0]) if names else None
    if rates is None:
        problem = f"those of {names[0]} are unknown" if names else "their kind is unknown"
        raise ConfigError(f"--time needs the rates of the GPUs, but {problem}: add --gpu {' or --gpu '.join(GPUS)}")
    return rates


def _describe_threads(planned: Plan, *, is_local: bool, setting: int | None = None, is_inline: bool = False) -> str:
    if is_local:
        requested, usable_cpus = setting or read_requested_threads(), count_usable_cpus()
    else:  # OMP_NUM_THREADS and the CPUs of the other machine are unknown
        requested, usable_cpus = setting, None
    return render_threads(planned, requested, usable_cpus, is_inline=is_inline)


def _run_config(path: Path) -> type[RunConfig]:
    add_working_folder()
    schema = recipe_class(path)
    if not issubclass(schema, RunConfig):
        raise ConfigError(f"{path}: recipe is {schema.__name__}, which is not a RunConfig and has no placement")
    return schema


def _add_trace(commands: Commands) -> None:
    parser = commands.add_parser("trace", help="print how a run spent its time, and its bottleneck")
    parser.add_argument("trace", type=Path, metavar="RUN", help="the output folder of a run, or its trace.json")
    parser.add_argument("--last", type=seconds, metavar="SECONDS", help="analyze only the end of the run")
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> None:
    trace = read_trace(arguments.trace)
    events, dropped_until_ns = loop_events(trace.last_process()), trace.dropped_until_ns
    if not events:
        raise TraceError(f"{arguments.trace} has no calls after the start of the run")

    from flowrl.report.explain import explain  # noqa: PLC0415 (rich only if tables are printed)

    explain(events, dropped_until_ns=dropped_until_ns, window_s=arguments.last)


def _add_checkpoints(commands: Commands) -> None:
    parser = commands.add_parser("checkpoints", help="verify and list the checkpoints of a run")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run")
    parser.set_defaults(run=_checkpoints)


def _checkpoints(arguments: argparse.Namespace) -> None:
    from flowrl.checkpoints.listing import show_checkpoints  # noqa: PLC0415 (rich only if tables are printed)

    show_checkpoints(arguments.run_folder)


def _add_export(commands: Commands) -> None:
    parser = commands.add_parser("export", help="export a model of a run for transformers, with a model card")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the output folder of a run")
    parser.add_argument(
        "--step",
        type=natural,
        metavar="N",
        help="step of the checkpoint; default: the newest, or model/ of a run without checkpoints",
    )
    parser.add_argument(
        "--role", metavar="ROLE", help="role of the model; default: actor, or the only role with a model"
    )
    parser.add_argument("--output", type=Path, metavar="F", help="new folder; default: RUN/export-step-N")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="export only the adapter of a LoRA run, for peft, instead of the merged model; default folder: "
        "RUN/adapter-step-N",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=positive,
        metavar="GB",
        help="maximum size of a safetensors file in GB (10^9 bytes); default: 5",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the exported weights; default: that of the trained weights",
    )
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    run_folder, role = arguments.run_folder, arguments.role
    stated = {"max_shard_gb": arguments.max_shard_gb, "dtype": arguments.dtype}
    stated = {name: value for name, value in stated.items() if value is not None}
    if stated and arguments.adapter:
        raise UserError(
            "--adapter writes one small file in the dtype of training: remove --max-shard-gb and --dtype, or --adapter"
        )
    config = ExportConfig(**stated) if stated else None
    content, prefix = ("adapter", "adapter") if arguments.adapter else ("model", "export")
    checkpoints = Checkpoints(run_folder)
    is_selected = arguments.step is not None or arguments.adapter or role is not None
    checkpoint = None
    if is_selected or checkpoints.steps():
        checkpoint = checkpoints.read(checkpoints.require_steps()[-1] if arguments.step is None else arguments.step)

    # imported here, because only commands that load a model need torch
    from flowrl.inference.checkpoint_export import export_checkpoint, export_saved_model  # noqa: PLC0415
    from flowrl.inference.model_card import saved_role, saved_step, write_model_card  # noqa: PLC0415

    step = saved_step(run_folder) if checkpoint is None else checkpoint.manifest.step
    output = arguments.output or run_folder / f"{prefix}-step-{step:06d}"

    def finish(folder: Path, role: str) -> None:
        write_model_card(folder, run_folder, step=step, role=role, is_adapter=arguments.adapter)

    if checkpoint is None:
        role = saved_role(run_folder)
        export_saved_model(run_folder, output, role, config=config, finish=finish)
    else:
        role = export_checkpoint(
            checkpoint,
            output,
            role=role,
            only_adapter=arguments.adapter,
            config=config or ExportConfig(),
            finish=finish,
        )
    write_printable(f"{output}: the {content} of {role} after step {step}, with a model card (README.md)\n")


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="start a recipe's actor and rollout, and compare their weights and log-probabilities",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    path = arguments.config
    schema = _run_config(path)
    if not issubclass(schema, RolloutRunConfig):
        raise ConfigError(f"{path}: {schema.__name__} has no rollout: choose a recipe that generates responses")
    with loading(path, arguments.overrides, schema) as config:
        run_checks(CheckedRun(config), missing=Need.OUTPUT)

        # imported here, because only commands that run a model need torch and Ray
        from flowrl.run.doctor import examine  # noqa: PLC0415
        from flowrl.workers import Actor, Rollout  # noqa: PLC0415

        examine(config, Actor, Rollout)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) if part.isdecimal() else -1 for part in text.split(","))
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of device counts, like 8, or 4,4 for two nodes")
    if not any(counts):
        raise argparse.ArgumentTypeError(f"{text!r} has no devices: state at least one, like 8, or 4,4 for two nodes")
    return counts


def _add_stubs(commands: Commands) -> None:
    parser = commands.add_parser(
        "stubs", help="write the types of a module's worker groups, for type checkers and editors"
    )
    parser.add_argument("module", metavar="MODULE", help="a module with worker classes, such as my_recipe.workers")
    parser.set_defaults(run=_stubs)


def _stubs(arguments: argparse.Namespace) -> None:
    from flowrl.controller.group_stubs import write_stubs  # noqa: PLC0415 (imports torch with the module)

    add_working_folder()
    write_printable(f"wrote {write_stubs(arguments.module)}\n")


if __name__ == "__main__":
    sys.exit(main())
