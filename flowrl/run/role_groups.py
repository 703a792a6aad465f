"""Finds the roles of worker groups in the config of a run, and starts the groups that score responses."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from flowrl.config import JudgeConfig, RewardConfig, RolloutRunConfig, RunConfig, UserError
from flowrl.controller.errors import ProcessLost
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import Worker, get_registered_methods
from flowrl.report.run_observer import RunObserver
from flowrl.rewards.processes.isolation import describe_missing
from flowrl.schedules.rewards import EnvironmentScoring, Rewards, Scoring
from flowrl.workers.environment import EnvironmentWorker
from flowrl.workers.judge import Judge
from flowrl.workers.reward import Reward


def check_role(config: RunConfig, role: str) -> None:
    """Raises UserError if the config has no role with this name."""
    if role not in config.roles:
        name = type(config).__name__
        raise UserError(
            f"run.group({role!r}, ...) names no role of {name} (its roles: {', '.join(config.roles)}): add a "
            f"field {role} to {name} whose type is RoleConfig or a subclass, and placement.roles.{role}"
        )


def find_role(config: RunConfig, cls: type[Worker], arguments: Iterable[object]) -> str:
    """Returns the role whose settings are one of the arguments of a worker's constructor.

    Raises UserError if no role or several roles have this object as settings.
    """
    for argument in arguments:
        roles = [role for role, settings in config.role_settings.items() if settings is argument]
        if len(roles) > 1:
            raise UserError(
                f"the settings in run.group({cls.__name__}, ...) are those of the roles {' and '.join(roles)}, "
                f"which have the same object: name the role with run.group(role, {cls.__name__}, ...)"
            )
        if roles:
            return roles[0]
    raise UserError(
        f"the role of run.group({cls.__name__}, ...) is unknown, because no argument is the settings of one of the "
        f"roles {', '.join(config.roles)}: pass config.ROLE, or name the role with "
        f"run.group(role, {cls.__name__}, ...)"
    )


def group_arguments(
    stated: RunConfig, applied: RunConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: arguments of a worker's constructor
    """Returns the arguments of `Cluster.group` for those of `Run.group`: the role, the class, and the constructor's.

    The settings of the role in `stated` are replaced by those in `applied`, which depend on the devices. Raises
    UserError if the role is unknown.
    """
    if isinstance(args[0], str):
        check_role(stated, args[0])
    else:
        args = (find_role(stated, args[0], (*args[1:], *kwargs.values())), *args)
    role = args[0]
    known, value = stated.role_settings[role], applied.role_settings[role]
    replaced = tuple(value if argument is known else argument for argument in args)
    return replaced, {name: value if argument is known else argument for name, argument in kwargs.items()}


def start_scoring(config: RunConfig, start: Callable[..., Any]) -> Scoring:
    """Starts the workers of the roles that score responses with `start`, which is `Run.group`.

    Raises UserError if the run has neither a reward nor an environment.
    """
    environment = config.environment if isinstance(config, RolloutRunConfig) else None
    if isinstance(config, RolloutRunConfig) and environment is not None:
        return EnvironmentScoring(environment, start(EnvironmentWorker, environment), config.data.max_prompt_tokens)
    role, reward = next(((name, value) for name, value in config if isinstance(value, RewardConfig)), (None, None))
    if role is None or reward is None:
        raise UserError(
            f"run.rewards needs a reward, but {type(config).__name__} has no field of the type RewardConfig: add one"
        )
    groups: dict[str, WorkerGroup] = {
        name: start(name, Judge, own, seed=config.seed) if isinstance(own, JudgeConfig) else start(name, Reward, own)
        for name, own in reward.roles(role).items()
    }
    return Rewards(reward, groups, role)


class Protections(RunObserver):
    """Finds the protections that the nodes of a run do not offer to reward functions and environments."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._groups: list[WorkerGroup] = []
        self.missing: dict[str, tuple[str, ...]] = {}
        """Role -> names of the missing protections. Excludes roles that have all."""

    def follow(self, group: WorkerGroup) -> None:
        """Adds a group whose workers run user code to the next report. Ignores other groups."""
        if "find_missing_protections" in get_registered_methods(group.cls):
            self._groups.append(group)

    def begun(self) -> None:
        self.report()

    def report(self) -> None:
        """Waits for the workers, and notifies the user of missing protections, once per role."""
        groups, self._groups = self._groups, []
        calls = {group.role: group.find_missing_protections.submit() for group in groups}
        for role, call in calls.items():
            with suppress(ProcessLost):  # the workers of the replacement process lack the same
                self._report(role, dict(call.get()))

    def _report(self, role: str, missing_of: Mapping[str, tuple[str, ...]]) -> None:
        missing = tuple(dict.fromkeys(name for names in missing_of.values() for name in names))
        if not missing:
            return
        self.missing[role] = missing
        nodes = [node for node, names in missing_of.items() if names]
        where = f" on {', '.join(nodes)}" if len(missing_of) > 1 else ""
        self._notify(
            f"{role}: the system{where} does not offer all protections against user code, which can "
            f"{describe_missing(missing)}: see docs/rewards.md, Isolation, before you run code that you do not trust"
        )
