"""What is checked of a run before anything starts. Loads neither torch nor ray."""

from collections.abc import Sequence

from flowrl.config import ActorConfig, ConfigError, CriticConfig, RunConfig
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Plan, plan
from flowrl.run.folder import refuse_if_taken


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
    """Refuses what can be told before data and models are read: the placement, and the output folder.

    Raises: as `plan_run`, and `RunFolderError`.
    """
    if config.address is None:
        plan_run(config)
    refuse_if_taken(config.output)


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
