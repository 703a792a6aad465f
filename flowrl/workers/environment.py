"""Environment worker, which runs the environments of episodes in separate processes."""

from collections.abc import Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from flowrl.config import EnvironmentConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import EnvironmentLimits, EnvironmentSpec, Reply, Request
from flowrl.workers.channel import ServingWorker

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
        self._host = EnvironmentHost(EnvironmentSpec(config.name, config.options), limits)

    @register(Dispatch.ONE_TO_ALL, memory=())
    def find_missing_protections(self) -> tuple[str, tuple[str, ...]]:
        """Returns the address of the node, and the protections that it does not offer to environments."""
        return self.context.address, self._host.find_missing_protections()

    def submit_request(self, request: Request, connection: Hashable) -> Future[Reply]:
        """Runs a call of an episode for a rollout worker (`Rollout.connect_environment`)."""
        assert isinstance(request, Request), "rollout workers send requests of environments"
        return self._host.submit(request, connection)

    def end_connection(self, connection: Hashable) -> None:
        """Discards the episodes of a lost rollout worker."""
        self._host.discard(connection)

    def close(self) -> None:
        super().close()
        self._host.close()
