"""CheckedRun: a config with results that the checks and the start of a run share. Lists the roles that generate."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from flowrl.config import ConfigError, JudgeConfig, ModelConfig, RolloutConfig, RunConfig, keys_of, models_of
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import Plan, plan
from flowrl.memory.device_settings import FittedRun, fit_memory, resolve_settings
from flowrl.memory.memory_table import MemoryBudget


class CheckedRun:
    """A config, its placement plan, and its settings on the planned devices. Each is computed once, at its first use.

    Args:
        config: the config of the run.
        devices: number of devices per node. If None or empty: `devices` of the config, or else those of this machine.
        planned: the placement plan. None computes it.
        gpu: name of the GPUs. None uses the name of the GPUs of this machine, if the run uses them.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: Sequence[int] | None = None,
        planned: Plan | None = None,
        gpu: str | None = None,
    ) -> None:
        self.config, self._devices, self._gpu = config, devices, gpu
        self.is_local = devices is None and config.address is None
        """Whether the devices are those of this machine."""
        if planned is not None:
            self.plan = planned

    @property
    def missing_devices(self) -> str | None:
        """Why there is no placement plan, and which setting to add. None if the devices are known."""
        config = self.config
        if "plan" in self.__dict__ or config.address is None:
            return None
        if not self._stated_devices:
            return (
                f"the devices of the cluster at {config.address} are unknown: set devices to their number per node, "
                f"such as [8, 8] (flowrl plan: --devices 8,8)"
            )
        if config.placement.device == "auto":
            return (
                f"placement.device is auto, but only the nodes of the cluster at {config.address} know whether they "
                f"have GPUs: set it to cuda or cpu"
            )
        return None

    @property
    def _stated_devices(self) -> Sequence[int] | None:
        return self._devices or self.config.devices

    @cached_property
    def plan(self) -> Plan:
        config = self.config
        if (missing := self.missing_devices) is not None:
            raise ConfigError(missing)
        inventory = local_inventory(config.placement.device, self._stated_devices)
        return plan(config.placement, inventory, config.roles, config.dedicated_roles())

    @cached_property
    def resolved(self) -> RunConfig:
        """The config with values for those null settings that depend on the kind of devices."""
        return resolve_settings(self.config, self.plan)

    @cached_property
    def fitted(self) -> FittedRun:
        """The settings and the memory of all devices. Raises ConfigError if the memory is too small. Imports torch."""
        return fit_memory(self.resolved, self.plan, is_local=self.is_local, gpu=self._gpu)

    @property
    def applied(self) -> FittedRun:
        """The settings with which the run starts. On CPUs, no setting depends on the memory, so the memory is not
        estimated.
        """
        return FittedRun(self.resolved, (), MemoryBudget()) if self.plan.kind == "cpu" else self.fitted

    def replace(self, config: RunConfig, planned: Plan | None = None) -> "CheckedRun":
        """Returns a CheckedRun with this config and plan, or this object if it already has both.

        If `planned` is None and all settings that determine the plan are equal, the new object keeps the plan. It
        computes all other results again. The config of a run changes if the number of steps depends on the data. The
        plan changes when the run joins a cluster.
        """
        if planned is None and _devices_of(config) == _devices_of(self.config):
            planned = self.__dict__.get("plan")
        is_same_plan = planned is None or planned == self.__dict__.get("plan")
        return self if config == self.config and is_same_plan else CheckedRun(config, self._devices, planned, self._gpu)


def _devices_of(config: RunConfig) -> tuple[object, ...]:
    """Returns all settings that determine the placement plan."""
    return config.placement, config.devices, config.address, config.roles, config.dedicated_roles()


class Generator(NamedTuple):
    """A rollout or a judge."""

    role: str
    key: str
    """Key of the role's settings in the config."""
    settings: RolloutConfig
    """Settings of the engine that generates."""
    model: ModelConfig | None
    """Model that generates. None if the run has no actor."""
    model_key: str
    """Key of the settings of the model."""


def find_generators(config: RunConfig) -> Iterator[Generator]:
    """Yields the rollouts and judges of a run."""
    keys, actor = keys_of(config), models_of(config).get("actor")
    for role, value in config.role_settings.items():
        if isinstance(value, JudgeConfig):
            yield Generator(role, keys[role], value.generation, value.model, f"{keys[role]}.model")
        elif isinstance(value, RolloutConfig):
            yield Generator(role, keys[role], value, None if actor is None else actor.model, "actor.model")
