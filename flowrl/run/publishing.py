"""New weights on their way from the actor to the rollout."""

from flowrl.config import RolloutConfig, RunConfig, TransferConfig
from flowrl.controller.future import Future
from flowrl.controller.group import WorkerGroup


class Publisher:
    """Hands a policy's weights to a rollout, in parts of bounded size, without waiting for anything.

    Parts go from process to process; the driver only says which. Calls of one process come in the order in which they
    are submitted, so every part is of the weights that the actor has after the calls before it, and the rollout
    answers the calls before it with the old weights, and those after it with the new ones.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._counts: dict[tuple[str, str], Future] = {}

    def prepare(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        """Asks for what `hand_over` needs to know, so that it need not wait."""
        if not _is_shared(actor, rollout):
            self._count(actor, rollout)

    def hand_over(self, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> None:
        """Gives the rollout the actor's present weights, as those of a version.

        In the same processes the rollout samples from the actor's own weights, and only their number changes.
        """
        if _is_shared(actor, rollout):
            rollout.set_version.submit(version)
            return
        config, dtype = self._of(rollout)
        num_chunks = self._count(actor, rollout).get()
        # All leave before the first arrives: a device that the two have in turns changes hands once.
        parts = [actor.weights.submit(chunk, config.chunk_mb, dtype) for chunk in range(num_chunks)]
        for chunk, weights in enumerate(parts):
            rollout.load_weights.submit(weights, version, chunk, num_chunks)

    def _count(self, actor: WorkerGroup, rollout: WorkerGroup) -> Future:
        roles = (actor.role, rollout.role)
        if roles not in self._counts:
            config, dtype = self._of(rollout)
            self._counts[roles] = actor.num_chunks.submit(config.chunk_mb, dtype)
        return self._counts[roles]

    def _of(self, rollout: WorkerGroup) -> tuple[TransferConfig, str | None]:
        """How weights travel to a role, and in which type; a role of the user's own may have no such settings."""
        found = dict(self._config).get(rollout.role)
        return (found.transfer, found.sent_dtype) if isinstance(found, RolloutConfig) else (TransferConfig(), None)


def _is_shared(actor: WorkerGroup, rollout: WorkerGroup) -> bool:
    return rollout.lives_in(actor) and actor.lives_in(rollout)
