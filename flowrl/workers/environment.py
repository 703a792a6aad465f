"""Environment worker, which runs the environments of episodes in separate processes."""

from typing import TYPE_CHECKING

from flowrl.config import EnvironmentConfig
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import EnvironmentLimits, EnvironmentSpec
from flowrl.workers.serving_worker import ServingWorker

if TYPE_CHECKING:
    from flowrl.workers.groups import EnvironmentGroup


class EnvironmentWorker(ServingWorker["EnvironmentGroup"]):
    """Worker that runs the environments of episodes for rollout workers."""

    stateless = True

    def __init__(self, config: EnvironmentConfig) -> None:
        limits = EnvironmentLimits(
            workers=-(-config.workers // self.world_size),
            timeout_s=config.timeout_s,
            on_timeout=config.on_timeout,
            max_timeouts=config.max_timeouts,
            memory_mb=config.memory_mb,
            allow_network=config.network,
        )
        self.service = EnvironmentHost(EnvironmentSpec(config.name, config.options), limits)
