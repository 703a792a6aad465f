"""What roles with a model have in common: the device is theirs in turns, and what is trained has checkpoints."""

from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.config import ActorConfig, CriticConfig, ReferenceConfig, RewardConfig
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.checksums import Saved
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.train.engine import TrainEngine

_Config = ActorConfig | CriticConfig | ReferenceConfig | RewardConfig


class ModelWorker(Worker):
    """A role that runs a model; the constructor sets `engine`."""

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
    """A role whose model is trained."""

    collective = True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> None:
        """Takes all that training goes on from and writes it into an empty folder; beside later calls, if asked to."""
        self._checkpoints.save(folder, asynchronous=asynchronous, extra_files=self.description())

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def checkpoint_saved(self, wait: bool = True) -> Saved | None:
        """What this rank wrote of the last save; None while some rank still writes, unless it should wait."""
        return self._checkpoints.result(wait=wait)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        """Goes on from what any number of ranks have saved in a folder."""
        load(self.engine, folder)

    def description(self) -> dict[str, bytes]:
        """Files, by name, that a checkpoint has besides the engine's."""
        return {}

    @cached_property
    def _checkpoints(self) -> EngineCheckpoints:
        return EngineCheckpoints(self.engine)
