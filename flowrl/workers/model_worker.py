"""Base classes of workers with a model. They provide the process groups, the offload of idle models, and
checkpoints.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.config import ActorConfig, CriticConfig, EngineConfig, ReferenceConfig, RewardConfig, shards_model
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.checksums import Saved
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.engine import TrainEngine

_Config = ActorConfig | CriticConfig | ReferenceConfig | RewardConfig


def build_rank_mesh(worker: Worker, engine: EngineConfig) -> RankMesh:
    """Creates the process groups of a worker's role. All ranks of the role must call this together."""
    return rank_mesh(
        worker.context.process_group,
        device=worker.device,
        tp=worker.mesh.tp,
        sp=worker.mesh.sp,
        shard_ranks=engine.shard_ranks,
    )


def has_collective_forward(mesh: Mesh, engine: EngineConfig) -> bool:
    """Returns whether several ranks must run a forward pass together, because of sharded weights or sequence
    parallelism.
    """
    return mesh.sp > 1 or shards_model(engine, mesh.size, mesh.tp)


class ModelWorker(Worker):
    """Worker with a `TrainEngine`. The constructor of the subclass must store it as `engine`."""

    engine: TrainEngine

    @classmethod
    def can_offload_device(cls, device: str, config: _Config, *_: Any, **__: Any) -> bool:  # Any: the constructor's
        return config.engine.offload == "idle"

    def offload(self, *, keep_weights: bool) -> None:
        if self.engine.offloads_when_idle:
            self.engine.offload(keep_weights=keep_weights)

    def onload(self) -> None:
        if self.engine.offloads_when_idle:
            self.engine.onload()


class TrainedWorker(ModelWorker):
    """Worker whose model is trained and saved in checkpoints."""

    collective = True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> None:
        """Writes the training state to an empty folder. With `asynchronous`, a background thread writes the files."""
        self._checkpoints.save(folder, asynchronous=asynchronous, extra_files=self.description())

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def checkpoint_saved(self, wait: bool = True) -> Saved | None:
        """Returns the files that this rank wrote. Without `wait`, returns None while a rank is still writing."""
        return self._checkpoints.result(wait=wait)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        """Restores the training state from a folder that any number of ranks wrote."""
        load(self.engine, folder)

    def description(self) -> dict[str, bytes]:
        """Returns additional checkpoint files, as name -> contents."""
        return {}

    @cached_property
    def _checkpoints(self) -> EngineCheckpoints:
        return EngineCheckpoints(self.engine)
