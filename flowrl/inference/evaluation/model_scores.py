"""Evaluates one model on the held-out prompts of a config, with the code of a run's evaluations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.config import (
    ONE_DEVICE,
    ConfigError,
    EvaluationConfig,
    EvaluationRunConfig,
    Placement,
    ReplicaSizes,
    RolePlacement,
)
from flowrl.controller.cluster import Cluster
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import plan
from flowrl.data.batch.batch import Batch
from flowrl.run.checks.check_list import Need, run_checks
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.checks.file_checks import find_path_problems
from flowrl.run.datasets import read_held_out
from flowrl.run.evaluation import Evaluation, PromptScores, evaluate
from flowrl.run.role_groups import Protections, start_scoring
from flowrl.workers import Rollout


@dataclass(frozen=True)
class TaskScores:
    """Result of one model on one task."""

    metrics: Mapping[str, float]
    """Metrics of the evaluation. The names are those of a run's metrics, without the name of the set."""
    prompts: Sequence[str]
    """Last user message of each prompt."""
    scores: PromptScores
    pass_score: float
    """Smallest score of a correct response."""
    rows: Sequence[Mapping[str, Any]]  # Any: values of JSON
    """The responses, with the columns of `rollouts/` (docs/generated_text.md)."""


def evaluate_model(
    config: EvaluationRunConfig,
    *,
    num_devices: int = 1,
    replica: ReplicaSizes = ONE_DEVICE,
    notify: Callable[[str], None],
) -> dict[str, TaskScores]:
    """Generates responses to all held-out prompts of a config, and scores them. Returns the scores of each set.

    The numbers equal those of an evaluation in a run with the same model and settings, and one rank.

    Args:
        config: the settings. The model is `config.actor.model`.
        num_devices: number of devices that generate. Above 1, each engine has a process of its own.
        replica: parallel sizes of the devices of one engine.
        notify: shows a message to the user.
    Raises:
        UserError: a setting, the data or the reward is invalid.
        WorkerError: a worker failed.
    """
    checked, held_out = check_evaluation(config, num_devices, replica)
    with _start_cluster(checked, notify) as cluster:
        protections = Protections(notify)

        def start(*args: Any, **kwargs: Any) -> Any:  # Any: the arguments of `Run.group`
            group = cluster.group(*args, **kwargs)
            protections.follow(group)
            return group

        applied = checked.applied.config
        assert isinstance(applied, EvaluationRunConfig), "the settings keep their class"
        scoring = start_scoring(applied, start)
        rollout = start("rollout", Rollout, applied.rollout, applied.actor.model, seed=config.seed)
        cluster.wait_for_calls()
        protections.report()
        return {
            name: _collect(name, evaluate(rollout, scoring, prompts, own), own)
            for name, prompts in held_out.items()
            for own in (config.evaluation_by_set[name],)
        }


def check_evaluation(
    config: EvaluationRunConfig, num_devices: int = 1, replica: ReplicaSizes = ONE_DEVICE
) -> tuple[CheckedRun, dict[str, Batch]]:
    """Checks the settings and the memory. Returns the checked run with the plan, and name of a set -> held-out prompts.
    Raises UserError.
    """
    config = _on_backend(config, num_devices, replica)
    roles = tuple(role for role in config.roles if role != "actor")  # the rollout loads the weights itself
    inventory = local_inventory(config.placement.device)
    planned = plan(config.placement, inventory, roles, config.dedicated_roles())
    checked = CheckedRun(config, planned=planned)
    run_checks(checked, missing=Need.OUTPUT | Need.TRAINING | Need.FILES)
    if problems := [problem for problem in find_path_problems(config) if not problem.startswith("data.train ")]:
        raise ConfigError(problems[0])
    return checked, read_held_out(config)


def _collect(name: str, result: Evaluation, config: EvaluationConfig) -> TaskScores:
    metrics = dict(result)  # waits for a pending evaluation, whose `scores` and `rows` are set only then
    (scores,) = result.scores.values()
    k = scores.scores_PN.shape[1]
    rows = [{**row, "set": name or None} for row in result.rows]
    return TaskScores(metrics, [row["prompt"] for row in rows[::k]], scores, config.pass_score, rows)


def _on_backend(config: EvaluationRunConfig, num_devices: int, replica: ReplicaSizes) -> EvaluationRunConfig:
    """Returns the settings with the backend and the placement of the evaluation: all roles on the same devices."""
    roles = [role for role in config.roles if role != "actor"]
    placement = Placement(
        device=config.placement.device,
        pools={"main": [num_devices]},
        roles=dict.fromkeys(["actor", *roles], "main")
        | {"rollout": RolePlacement(pool="main", tp=replica.tp, pp=replica.pp)},
        memory_gb=config.placement.memory_gb,
    )
    is_inline = num_devices == 1 and not config.dedicated_roles()
    backend = "inline" if is_inline else "ray"
    return config.model_copy(update={"placement": placement, "backend": backend, "address": None, "devices": None})


def _start_cluster(checked: CheckedRun, notify: Callable[[str], None]) -> Cluster:
    config = checked.config
    return Cluster(
        config.placement,
        backend=config.backend,
        planned=checked.plan,
        roles=tuple(checked.plan.roles),
        dedicated=config.dedicated_roles(),
        num_threads=config.threads,
        prepare=("flowrl.workers",),
        fork_workers=config.fork_workers,
        call_timeout_s=config.call_timeout_s,
        start_timeout_s=config.start_timeout_s,
        notify=notify,
    )
