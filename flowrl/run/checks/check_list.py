"""The list of all checks of a run, and the functions that run them.

The levels CONFIG and FILES import torch only to estimate memory and to import functions of the user.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Flag, IntEnum, auto
from typing import Any

from flowrl.checkpoints.resume import is_resuming
from flowrl.checkpoints.run_folder import check_is_new, check_not_locked
from flowrl.config import RunConfig
from flowrl.controller.placement.cpu_threads import read_requested_threads
from flowrl.controller.placement.inventory import find_ipc_problem, local_capability
from flowrl.controller.placement.plan import Plan
from flowrl.controller.placement.weight_transport import choose_transports
from flowrl.memory.memory_estimate import explain_unknown_sizes
from flowrl.memory.memory_table import GB
from flowrl.report.trackers.open_trackers import check_trackers
from flowrl.run.checks import config_checks, file_checks, placement_checks
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.schedules.schedule_plan import check_schedule
from flowrl.weight_sync.transfer import check_cuda_ipc, check_senders


class Level(IntEnum):
    """Cost of a check. Each level is more expensive than the one before."""

    CONFIG = auto()
    """Reads the config and the devices of this machine."""
    FILES = auto()
    """Reads names, headers and sizes of the files of models and data, and estimates the memory."""
    MODELS = auto()
    """Reads all data, and builds the models without their weights. Imports torch and the recipe."""
    STEP = auto()
    """Trains one small step."""


class Need(Flag):
    """Conditions for a check. A check whose needs are not met is skipped."""

    NONE = 0
    OUTPUT = auto()
    """The run writes its output folder, and reports to trackers."""
    START = auto()
    """This process starts the processes of the roles."""
    TRAINING = auto()
    """The run trains, and does not only generate."""
    FILES = auto()
    """The model and data files of the config are on this machine. If some are missing, the check fails."""
    PLAN = auto()
    """The devices are known. The check gets the settings on these devices, and the placement plan."""
    MACHINE = auto()
    """The devices are those of this machine."""


class CheckSkipped(Exception):
    """Raised by a check that does not apply to the config. The message is the reason."""


@dataclass(frozen=True)
class Check:
    """A check of a run."""

    row: str
    """Row of `flowrl check` to which its result belongs."""
    level: Level
    function: Callable[..., object]
    """Raises UserError if the run is invalid. A text that it returns describes the row."""
    needs: Need = Need.NONE
    arguments: Callable[[Any], tuple[Any, ...]] = lambda run: (run.config,)  # Any: CheckedRun or a subclass
    """Returns the arguments of `function`."""

    def run(self, run: CheckedRun) -> str | None:
        """Runs the check. Returns a description of its result, or None."""
        description = self.function(*self.arguments(run))
        return description if isinstance(description, str) else None


def list_checks(level: Level) -> tuple[Check, ...]:
    """Returns all checks up to a level, in the order of the rows of `flowrl check`."""
    checks = _CHECKS
    if level >= Level.MODELS:
        from flowrl.run.checks.model_checks import MODEL_CHECKS  # noqa: PLC0415 (torch)

        checks = (*checks, *MODEL_CHECKS)
    checks = sorted(checks, key=lambda check: (ROWS.index(check.row), check.level))
    return tuple(check for check in checks if check.level <= level)


def find_missing(run: CheckedRun) -> Need:
    """Returns the needs that a run on its devices does not meet."""
    return (Need.NONE if run.missing_devices is None else Need.PLAN) | (Need.NONE if run.is_local else Need.MACHINE)


def run_checks(run: CheckedRun, *, missing: Need = Need.NONE, row: str | None = None) -> CheckedRun:
    """Runs the checks of the levels CONFIG and FILES in this order, and returns `run`.

    Args:
        run: the config and its plan.
        missing: needs that the caller does not meet, in addition to those that `run` does not meet.
        row: runs only the checks of this row. None: of all rows.
    Raises:
        UserError: the first check that fails.
        RunComplete: the output folder has this run with all its steps.
    """
    unmet = missing | find_missing(run)
    for check in sorted(list_checks(Level.FILES), key=lambda check: check.level):
        if not check.needs & unmet and row in (None, check.row):
            with suppress(CheckSkipped):
                check.run(run)
    return run


def check_start(config: RunConfig) -> CheckedRun:
    """Runs all checks of a start before it reads data and loads models. Raises like `run_checks`."""
    return run_checks(CheckedRun(config))


def check_placement(run: CheckedRun) -> Plan:
    """Returns the placement plan of a run. Raises ConfigError if the roles cannot run on their devices."""
    return run_checks(run, row="placement").plan


def _check_threads(config: RunConfig) -> None:
    """Raises UserError if the run needs OMP_NUM_THREADS, which is invalid."""
    if config.threads is None:
        read_requested_threads()


def _check_output(config: RunConfig) -> str:
    """Checks that the output folder can be used. Changes nothing in it."""
    check_not_locked(config.output)
    if is_resuming(config):
        return f"the run continues in {config.output}"
    check_is_new(config.output)
    return f"{config.output} is free"


def _check_memory(run: CheckedRun) -> str:
    """Raises ConfigError if the memory of a device is too small."""
    devices, budget = run.fitted.devices, run.fitted.budget
    if not all(device.is_known for device in devices):
        raise CheckSkipped("; ".join(explain_unknown_sizes(run.config)))
    available = budget.per_device or budget.per_node
    limit = "an unknown amount" if available is None else f"{available / GB:.1f} GB"
    share = "device" if budget.per_device is not None else "node"
    return f"at most {max((d.peak[0] for d in devices), default=0) / GB:.1f} GB per device; each {share} has {limit}"


def _with_capability(run: CheckedRun) -> tuple[RunConfig, tuple[int, int] | None]:
    return run.resolved, local_capability() if run.plan.kind == "cuda" else None


def _with_ipc_problem(run: CheckedRun) -> tuple[RunConfig, Plan, tuple[str, str] | None]:
    return run.resolved, run.plan, find_ipc_problem()


def _of_plan(row: str, level: Level, needs: Need, *functions: Callable[..., object]) -> Iterator[Check]:
    """Yields checks whose functions get the settings on the planned devices, and the plan."""
    for function in functions:
        yield Check(row, level, function, Need.PLAN | needs, lambda run: (run.resolved, run.plan))


_CHECKS = (
    Check("output", Level.CONFIG, _check_output, Need.OUTPUT),
    Check("functions", Level.CONFIG, _check_threads, Need.START),
    Check("functions", Level.CONFIG, check_trackers, Need.OUTPUT, lambda run: (run.config.report,)),
    Check("functions", Level.CONFIG, config_checks.check_functions),
    Check("functions", Level.CONFIG, config_checks.check_processes),
    Check("models", Level.CONFIG, config_checks.check_partial_models),
    Check("functions", Level.CONFIG, config_checks.check_packages, Need.START | Need.MACHINE),
    Check("functions", Level.CONFIG, config_checks.check_engine_args),
    Check("files", Level.FILES, file_checks.check_paths, Need.FILES),
    Check("models", Level.FILES, file_checks.check_positions),
    Check("models", Level.FILES, file_checks.check_reward_heads),
    Check("models", Level.FILES, file_checks.check_trained_weights, Need.TRAINING),
    Check("models", Level.FILES, file_checks.check_experts, Need.TRAINING),
    Check("tokenizer", Level.FILES, file_checks.check_vocabularies),
    Check("placement", Level.CONFIG, placement_checks.check_nodes, Need.START),
    *_of_plan("placement", Level.CONFIG, Need.NONE, placement_checks.describe_devices),
    *_of_plan("placement", Level.CONFIG, Need.NONE, placement_checks.check_quantization),
    *_of_plan(
        "placement",
        Level.CONFIG,
        Need.NONE,
        placement_checks.check_async_scheduling,
        placement_checks.check_speculation,
        placement_checks.check_other_engines,
    ),
    *_of_plan(
        "placement", Level.CONFIG, Need.TRAINING, placement_checks.check_engines, placement_checks.check_adapters
    ),
    *_of_plan("placement", Level.CONFIG, Need.TRAINING, placement_checks.check_determinism, check_schedule),
    *_of_plan("placement", Level.CONFIG, Need.TRAINING, placement_checks.check_profile, choose_transports),
    *_of_plan("placement", Level.CONFIG, Need.TRAINING, check_senders),
    *_of_plan("placement", Level.FILES, Need.NONE, placement_checks.check_head_sizes, placement_checks.check_replicas),
    *_of_plan("placement", Level.FILES, Need.TRAINING, placement_checks.check_model_sizes),
    *_of_plan("memory", Level.CONFIG, Need.TRAINING, placement_checks.warn_about_offload),
    Check("memory", Level.CONFIG, placement_checks.check_bfloat16, Need.PLAN | Need.MACHINE, _with_capability),
    Check("memory", Level.CONFIG, check_cuda_ipc, Need.PLAN | Need.MACHINE | Need.TRAINING, _with_ipc_problem),
    Check("memory", Level.FILES, _check_memory, Need.PLAN, lambda run: (run,)),
)
"""All checks of the levels CONFIG and FILES."""

ROWS = (
    "output", "recipe", "functions", "files", "models", "tokenizer", "data", "reward", "placement", "memory", "step"
)  # fmt: skip
"""Rows of `flowrl check`, in order."""
