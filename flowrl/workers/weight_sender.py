"""Sender: a trained model whose weights others are given, in parts of bounded size."""

import socket
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flowrl.controller.worker import Dispatch, register
from flowrl.engines.models.loading import LanguageModel
from flowrl.engines.models.weights import export_weights, full_weights, weight_buckets, weight_shapes
from flowrl.engines.rollout.weight_check import WeightSamples, weight_samples
from flowrl.workers.model_worker import TrainedWorker

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.links import Described, IpcSender, SharedPart


class Sender(TrainedWorker):
    """A policy whose rollout may be in another process; the constructor sets `model`.

    A part is that of a number, of those into which `chunk_mb` cuts the weights, floating-point ones in the type of the
    name `dtype`; None is the type they have.
    """

    model: LanguageModel

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def num_chunks(self, chunk_mb: float, dtype: str | None = None) -> int:
        """Parts of at most so many MB of 10^6 bytes in which `weights` gives the weights."""
        return len(self._chunks(chunk_mb, dtype))

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weights(
        self, chunk: int = 0, chunk_mb: float | None = None, dtype: str | None = None
    ) -> dict[str, Any]:  # Any: NumPy arrays, see engines/models/weights.py
        """The present weights, for a rollout in another process; of ranks that share them the first has the answer.

        All of them, or one part of those of `num_chunks`, and floating-point weights in the type of that name.
        """
        names = None if chunk_mb is None else self._chunks(chunk_mb, dtype)[chunk]
        # The result of a call is a copy already.
        return export_weights(self.model, names, dtype=_type(dtype), is_receiver=self.rank == 0, snapshot=False)

    def _chunks(self, chunk_mb: float, dtype: str | None) -> list[list[str]]:
        key = (chunk_mb, dtype)
        if key not in self._known_chunks:
            self._known_chunks[key] = weight_buckets(self.model, chunk_mb * 1e6, _type(dtype))
        return self._known_chunks[key]

    @cached_property
    def _known_chunks(self) -> dict[tuple[float, str | None], list[list[str]]]:
        return {}

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def weight_samples(
        self, version: int, part: int = 0, parts: int | None = None, dtype: str | None = None
    ) -> WeightSamples:
        """What a rollout must serve if it has these weights, which are those of a version: a few columns of some, or
        with `parts` all of every parts-th weight from `part` on. `dtype` is the type they were sent in."""
        return weight_samples(self.model, version, part=part, parts=parts, dtype=_type(dtype), wanted=self.rank == 0)

    # Between GPUs, see engines/rollout/vllm/links.py.

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def describe_weights(self, chunk: int, chunk_mb: float, dtype: str | None = None) -> "Described":
        """What a part has, for who receives it through a link."""
        from flowrl.engines.rollout.vllm.links import Described  # noqa: PLC0415 (an extra, where this way is taken)

        return Described.of(weight_shapes(self.model, self._chunks(chunk_mb, dtype)[chunk], _type(dtype)))

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def share_weights(
        self, chunk: int, chunk_mb: float, dtype: str | None = None, after: object = None
    ) -> "SharedPart":
        """A part in the memory of each rank's GPU, for the process beside it; it lies there until the next.

        `after` is the result of a call that must be done before: the reading of the part before this one.
        """
        described = self.describe_weights(chunk, chunk_mb, dtype)
        weights = full_weights(self.model, described.names, _type(dtype))
        return self._ipc.share(weights, described.num_bytes)

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=())
    def release_weights(self, after: object = None) -> None:
        """Lets go of the last part."""
        self._ipc.release()

    @register(Dispatch.RANK_ZERO, memory=())
    def open_link(self) -> tuple[str, int]:
        """Where a link can meet: this rank's address, and a port that is free there."""
        with socket.create_server((self.context.address, 0)) as listener:
            return self.context.address, listener.getsockname()[1]

    @register(Dispatch.RANK_ZERO, blocking=False, memory=())
    def join_link(self, link: Mapping[str, Any]) -> None:  # Any: the fields of `Link`
        """Joins a link; done when all have."""
        from flowrl.engines.rollout.vllm.links import Link, NcclSender  # noqa: PLC0415 (as above)

        self._link: NcclSender = NcclSender(Link(**link))

    @register(Dispatch.ALL_TO_ONE, blocking=False)
    def send_weights(self, chunk: int, chunk_mb: float, dtype: str | None = None) -> None:
        """Broadcasts a part through the link, from the first rank; the others help to put it together."""
        weights = full_weights(self.model, self._chunks(chunk_mb, dtype)[chunk], _type(dtype))
        if self.rank == 0:
            self._link.send(weights)
        else:
            for _ in weights:
                pass

    @cached_property
    def _ipc(self) -> "IpcSender":
        from flowrl.engines.rollout.vllm.links import IpcSender  # noqa: PLC0415 (as above)

        return IpcSender()


def _type(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
