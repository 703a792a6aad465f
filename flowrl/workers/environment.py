"""Environment worker, which runs the environments of episodes in separate processes."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from flowrl.config import EnvironmentConfig
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import EnvironmentLimits, EnvironmentSpec, Reply, Request
from flowrl.workers.channel import RequestServer, ServerAddress

if TYPE_CHECKING:
    from flowrl.workers.groups import EnvironmentGroup


class EnvironmentWorker(Worker["EnvironmentGroup"]):
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
        self._server: RequestServer | None = None

    @register(Dispatch.ONE_TO_ALL, replay=True, memory=())
    def serve(self, key: bytes, ports: Sequence[int] | None = None) -> ServerAddress:
        """Runs episodes for the rollout workers that connect. The arguments are those of `Reward.serve`."""
        port = 0 if ports is None else ports[self.rank]
        if self._server is None or port not in (0, self._server.address.port):
            self._server = RequestServer(self.context.address, port, key, self._submit)
        self._server.key = key  # a restarted run has another key
        return self._server.address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._host.close()

    def _submit(self, request: Any) -> Future[Reply]:  # Any: a value of the channel
        assert isinstance(request, Request), "rollout workers send requests of environments"
        return self._host.submit(request)
