"""Puts a run's settings for its devices into arguments of worker groups, and starts groups that score responses."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flowrl.config import JudgeConfig, ModelRoleConfig, RewardConfig, RoleConfig, RolloutRunConfig, RunConfig, UserError
from flowrl.controller.errors import ProcessLost
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import get_registered_methods
from flowrl.data.batch.batch import Batch
from flowrl.report.run_observer import RunObserver
from flowrl.schedules.rewards import EnvironmentScoring, Rewards, Scoring
from flowrl.user_code.isolation import describe_missing
from flowrl.workers.environment import EnvironmentWorker
from flowrl.workers.judge import Judge
from flowrl.workers.reward import Reward


def group_arguments(
    stated: RunConfig, applied: RunConfig, role: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # Any: arguments of a worker's constructor
    """Returns the arguments of a worker's constructor, with settings of `applied` in place of settings of `stated`.

    The recipe passes settings of `stated`, which lack the values that depend on the devices. To find the role of such
    settings, they are compared with all settings in `stated`. If several roles have equal settings, `role` comes first.
    Returns None if the config field of the role is null. Raises UserError if the config has no such role, or if an
    argument has settings that no role has.
    """
    if not isinstance(role, str):
        raise UserError(
            f"run.group got {getattr(role, '__name__', role)} as its first argument, which must be the name of a role: "
            'call run.group("actor", Actor, config.actor)'
        )
    known = stated.role_settings
    if role not in known:
        if role in stated.possible_roles() and dict(stated)[role] is None:
            return None
        name = type(stated).__name__
        raise UserError(
            f"run.group({role!r}, ...) names no role of {name} (its roles: {', '.join(known)}): add a field {role} to "
            f"{name} whose type is RoleConfig or a subclass, and placement.roles.{role}"
        )

    def apply(argument: Any) -> Any:
        if not isinstance(argument, RoleConfig):
            return argument
        for name in (role, *known):
            if known[name] == argument:
                return applied.role_settings[name]
        raise UserError(
            f"run.group({role!r}, ...) has settings of the type {type(argument).__name__} that differ from those of "
            f"all roles of the run ({', '.join(known)}): pass config.ROLE, and change settings before the run starts"
        )

    return tuple(map(apply, args)), {name: apply(value) for name, value in kwargs.items()}


def start_scoring(
    config: RunConfig, start: Callable[..., Any], on_scored: Callable[[Batch], None] = lambda scored: None
) -> Scoring:
    """Starts the roles that score responses, and returns the interface to score batches. `start` is `Run.group`.

    `on_scored` is called with each batch that the recipe scores with the training rewards. With an environment, it is
    not called. Raises UserError if the run has neither a reward nor an environment.
    """
    environment = config.environment if isinstance(config, RolloutRunConfig) else None
    if isinstance(config, RolloutRunConfig) and environment is not None:
        return EnvironmentScoring(
            environment, start("environment", EnvironmentWorker, environment), config.data.max_prompt_tokens
        )
    role, reward = next(((name, value) for name, value in config if isinstance(value, RewardConfig)), (None, None))
    if role is None or reward is None:
        raise UserError(
            f"run.rewards needs a reward, but {type(config).__name__} has no field of the type RewardConfig: add one"
        )
    groups: dict[str, WorkerGroup] = {
        name: start(name, Judge, own, seed=config.seed) if isinstance(own, JudgeConfig) else start(name, Reward, own)
        for name, own in reward.roles(role).items()
    }
    return Rewards(reward, groups, role, on_scored)


class PartialModels(RunObserver):
    """For roles with `model.strict: false`, finds the weights that only the model or only its files have."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._groups: list[WorkerGroup] = []
        self.differences: dict[str, dict[str, list[str]]] = {}
        """Role -> names of weights that its files lack (`missing`) or have in addition (`unexpected`), if any."""

    def follow(self, group: WorkerGroup, settings: object) -> None:
        """Adds a group to the report if its model may differ from its files. `settings` are those of the role."""
        model = settings.model if isinstance(settings, JudgeConfig | ModelRoleConfig) else None
        if model is not None and not model.strict and "weight_differences" in get_registered_methods(group.cls):
            self._groups.append(group)

    def begun(self) -> None:
        """Waits for the workers, and notifies the user of the differences, once per role."""
        for call in {group.role: group.weight_differences.submit() for group in self._groups}.items():
            role, found = call[0], call[1].get()
            if found:
                self.differences[role] = {"missing": list(found.missing), "unexpected": list(found.unexpected)}
                self._notify(
                    f"{role}.model.strict is false: its folder {found.describe()}; missing weights are initialized "
                    f"as in a new model, others are ignored, and weight_differences in summary.json has all names"
                )
        self._groups = []


class Protections(RunObserver):
    """Finds the protections against user code (reward functions and environments) that the nodes of a run lack."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._groups: list[WorkerGroup] = []
        self.missing: dict[str, tuple[str, ...]] = {}
        """Role -> names of the missing protections. Excludes roles without a missing one."""

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
            with suppress(ProcessLost):  # the replacement process lacks the same protections
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
