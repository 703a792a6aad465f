"""An actor and a dedicated rollout on one device that append the operations on its memory to a file.

The device is the CPU, behind the interface of all devices. The workers make the calls of GPUs: they offload, sleep and
wake up.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.config import ActorConfig, ModelConfig, RolloutConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.devices import device as devices
from flowrl.engines.rollout.base import TAGS, EngineContext
from flowrl.engines.rollout.cuda_ipc import IpcBucket, read_bucket
from flowrl.workers import Actor, Rollout
from tests.devices.recorded_device import RecordedDevice
from tests.engines.rollout.scripted_engine import ScriptedEngine


def write(log: Path, operation: str) -> None:
    with log.open("a") as file:
        file.write(f"{operation}\n")


def record_device(log: Path) -> None:
    """Records the operations on the CPU of this process from now on."""
    if not isinstance(devices._CPU, RecordedDevice):
        devices._CPU = RecordedDevice(devices._CPU, lambda operation: write(log, operation))  # pyright: ignore


BUFFERS: dict[int, Tensor] = {}
"""Bucket -> buffer that the actor shares with the rollout in the same process."""


def take_buffer(bucket: int) -> Tensor:
    return BUFFERS.pop(bucket)


class RecordedActor(Actor):
    def __init__(self, config: ActorConfig, log: Path) -> None:
        record_device(log)
        self.log = log
        super().__init__(config)

    def offload(self, *, keep_weights: bool) -> None:
        write(self.log, "actor offload")
        super().offload(keep_weights=keep_weights)

    def _bind(self, *args: Any) -> Any:  # Any: as in Actor
        write(self.log, "actor update")
        return super()._bind(*args)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(self, bucket: int, bucket_mb: float, dtype: str | None = None, after: object = None) -> IpcBucket:
        """Shares a bucket under a name, because the inline backend cannot copy the handle of shared memory."""
        shared = super().share_weights(bucket, bucket_mb, dtype)
        open_buffer, arguments = shared.handles["cpu"]
        BUFFERS[bucket] = open_buffer(*arguments)
        return IpcBucket(shared.metadata, {"cpu": (take_buffer, (bucket,))})


class RecordedRollout(Rollout):
    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        record_device(Path(str(config.options["folder"])))
        super().__init__(config, model, seed=seed)

    @classmethod
    def can_offload_device(cls, device: str, *_: Any, **__: Any) -> bool:  # Any: of the constructor
        return True


class SleepingEngine(ScriptedEngine):
    """A dedicated engine that sleeps on the CPU, and reads IPC buckets."""

    capabilities = replace(
        ScriptedEngine.capabilities, own_process=True, sleep=True, gpu_transports=("cuda_ipc",), options=("folder",)
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.log = Path(str(context.config.options["folder"]))

    @property
    def asleep(self) -> frozenset[str]:
        return self.serving.asleep

    def sleep(self, *, keep_weights: bool = True) -> None:
        self.serving.check_sleep()
        if not keep_weights:
            self.serving.drop_weights()
        write(self.log, "rollout sleep" if keep_weights else "rollout sleep without weights")
        self.serving.asleep = TAGS

    def wake(self, tags: Collection[str] = TAGS) -> None:
        waking = self.serving.tags_to_wake(tags)
        write(self.log, f"rollout wake {' '.join(sorted(waking))}")
        self.serving.asleep -= waking

    def begin(self, requests: Any) -> Any:  # Any: as in ScriptedEngine
        write(self.log, "rollout generate")
        return super().begin(requests)

    def receive(self, weights: Mapping[str, np.ndarray] | IpcBucket) -> None:
        write(self.log, "rollout receive")
        if isinstance(weights, IpcBucket):
            weights = {name: weight.numpy() for name, weight in read_bucket(weights, torch.device("cpu"))}
        super().receive(weights)

    def commit(self) -> None:
        self.serving.check_complete()
        self.serving.commit()
