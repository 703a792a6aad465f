"""What is checked of a run before anything starts. Loads neither torch nor ray."""

from collections.abc import Sequence

from flowrl.config import ConfigError, EngineConfig, RunConfig
from flowrl.controller.inventory import local_inventory
from flowrl.controller.plan import Plan, plan


def plan_run(config: RunConfig, devices: Sequence[int] | None = None) -> Plan:
    """The plan of a run on this machine, or on an inventory of `devices` per node that is stated instead.

    Raises:
        PlacementError: the placement does not fit.
        ConfigError: a role's engine cannot run on the ranks that the placement gives it.
    """
    placement = config.placement
    planned = plan(placement, local_inventory(placement.device, devices or config.devices), type(config).roles)
    if config.backend == "ray":
        _check_engines(config, planned)
    return planned


def _check_engines(config: RunConfig, planned: Plan) -> None:
    for role, place in planned.roles.items():
        mesh = place.mesh
        for name, size in (("tp", mesh.tp), ("sp", mesh.sp), ("pp", mesh.pp)):
            if size > 1:
                raise ConfigError(
                    f"placement.roles.{role} has {name} {size}, but every strategy here holds the whole model on each "
                    f"rank: remove {name}, so that the ranks of its pool are data-parallel"
                )
        settings = getattr(config, role, None)  # not every role has settings of its own, and not every one an engine
        engine = getattr(settings, "engine", None)
        if isinstance(engine, EngineConfig) and engine.strategy == "single" and mesh.size > 1:
            raise ConfigError(
                f"{role}.engine.strategy is single, but pool {place.pool} gives the role {mesh.size} ranks: "
                f"set strategy: auto or ddp, or make the pool one device"
            )
