"""`ServingWorker`: a worker that runs user code for rollout workers."""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from flowrl.controller.worker import Dispatch, GroupType, Worker, register
from flowrl.user_code.channel import RequestServer, ServerAddress


class Service(Protocol):
    """Runs user code in processes, such as an `EnvironmentHost`."""

    def submit(self, request: Any, owner: Hashable, /) -> Future:  # Any: a value of the channel
        """Returns the future of the result of a request. Is called in several threads."""
        ...

    def discard(self, owner: Hashable, /) -> None:
        """Frees the resources of an owner that sends no further requests."""
        ...

    def find_missing_protections(self) -> tuple[str, ...]:
        """Returns the protections that the system does not offer to user code."""
        ...

    def close(self) -> None:
        """Ends all processes."""
        ...


class ServingWorker(Worker[GroupType]):
    """Worker whose service responds to requests of rollout workers over sockets, without the driver."""

    service: Service
    """Set by the constructor of the subclass."""

    _server: RequestServer | None = None

    @register(Dispatch.ONE_TO_ALL, replay=True, memory=())
    def serve(self, key: bytes, ports: Sequence[int] | None = None) -> ServerAddress:
        """Starts the server for requests of rollout workers. Returns the address of this rank.

        Args:
            key: key of the run, which authenticates the rollout workers.
            ports: port of each rank, so that a replaced process has the same address. None selects free ports.
        """
        port = 0 if ports is None else ports[self.rank]
        if self._server is None or port not in (0, self._server.address.port):
            self._server = RequestServer(self.context.address, port, key, self.service.submit, self.service.discard)
        self._server.key = key  # a restarted run has another key
        return self._server.address

    @register(Dispatch.ONE_TO_ALL, memory=())
    def find_missing_protections(self) -> tuple[str, tuple[str, ...]]:
        """Returns the address of the node, and the protections that it does not offer to user code."""
        return self.context.address, self.service.find_missing_protections()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.service.close()
