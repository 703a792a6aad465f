"""What is checked of a run before anything starts. Loads neither torch nor ray."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.config import ActorConfig, AdvantageConfig, ConfigError, CriticConfig, RunConfig
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Plan, plan
from flowrl.run.folder import refuse_if_taken
from flowrl.run.resume import goes_on


def plan_run(config: RunConfig, devices: Sequence[int] | None = None) -> Plan:
    """The plan of a run on this machine, or on an inventory of `devices` per node that is stated instead.

    Raises:
        PlacementError: the placement does not fit.
        ConfigError: a role's engine cannot run on the ranks that the placement gives it.
    """
    placement, stated = config.placement, devices or config.devices
    if config.address is not None and stated is None:
        raise ConfigError(
            f"the run joins the cluster at {config.address}, whose devices are not known here: state them per node, "
            f"with --devices 8,8 or devices: [8, 8]"
        )
    planned = plan(placement, local_inventory(placement.device, stated), type(config).roles)
    check_engines(config, planned)
    return planned


def check_run(config: RunConfig) -> None:
    """Refuses what can be told before data and models are read: functions, placement, and the output folder.

    Raises: as `plan_run`, and `RunFolderError`.
    """
    check_functions(config)
    if config.address is None:
        plan_run(config)
    if not goes_on(config):
        refuse_if_taken(config.output)


def check_functions(config: RunConfig) -> None:
    """Imports the estimators, losses and the like that the config names as `module:function`.

    Raises: ConfigError for one that cannot be imported, does not fit its kind, or has other settings.
    """
    own = [chosen for chosen in _chosen_functions(config) if ":" in chosen[2]]
    if not own:
        return
    from flowrl.algorithms import registry  # noqa: PLC0415 (torch, only where a config names a function of its own)

    kinds = {
        "estimator": registry.advantage_estimators,
        "kind": registry.rollout_corrections,
        "loss": registry.policy_losses,
        "kl_kind": registry.kl_kinds,
        "kl_loss_kind": registry.kl_kinds,
        "aggregation": registry.aggregation_modes,
    }
    for group, key, name, options in own:
        try:
            kinds[key].check(name, options)
        except registry.RegistryError as error:
            raise ConfigError(f"{group}.{key}: {error}") from error


def _chosen_functions(config: RunConfig) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(group, key, name, settings) of every choice of a function."""
    for group, value in config:
        if isinstance(value, ActorConfig):
            yield group, "loss", value.loss, value.loss_options or {}
            yield group, "kl_loss_kind", value.kl_loss_kind, {}
            yield group, "aggregation", value.aggregation, {}
        elif isinstance(value, AdvantageConfig):
            yield group, "estimator", value.estimator, value.options or {}
            yield group, "kl_kind", value.kl_kind or "", {}
            if value.correction is not None:
                yield f"{group}.correction", "kind", value.correction.kind, value.correction.options or {}


def check_engines(config: RunConfig, planned: Plan) -> None:
    """Refuses a role whose engine cannot run on the ranks of its mesh. Raises `ConfigError`."""
    trained = {name: value for name, value in config if isinstance(value, ActorConfig | CriticConfig)}
    for role, place in planned.roles.items():
        mesh = place.mesh
        for name, size in (("tp", mesh.tp), ("sp", mesh.sp), ("pp", mesh.pp)):
            if size > 1:
                raise ConfigError(
                    f"placement.roles.{role} has {name} {size}, but every strategy here holds the whole model on each "
                    f"rank: remove {name}, so that the ranks of its pool are data-parallel"
                )
        single = role in trained and trained[role].engine.strategy == "single"
        if single and mesh.size > 1 and config.backend == "ray":
            raise ConfigError(
                f"{role}.engine.strategy is single, but pool {place.pool} gives the role {mesh.size} ranks: "
                f"set strategy: auto or ddp, or make the pool one device"
            )
