"""Sends hidden states to the next pipeline stage, and their gradients to the stage before."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from flowrl.engines.parallel.pipeline_mesh import PipelineMesh
from flowrl.engines.train.pipeline.stage_schedule import MAX_UNFINISHED


class _Send(NamedTuple):
    """An asynchronous send, with the sent tensor, which must stay allocated until the send ends."""

    work: Work
    tensor: Tensor


class StageTransfers:
    """Transfers between this stage and its neighbors. Sends are asynchronous.

    Each direction has a process group of its own. On a GPU, a send that waits for its receiver would otherwise block
    the other direction.
    """

    def __init__(self, mesh: PipelineMesh, device: torch.device) -> None:
        self._stage, self._states, self._gradients = mesh.stage, mesh.states, mesh.gradients
        self._device = device
        self._sent_states, self._sent_gradients = deque[_Send](), deque[_Send]()

    def send_states(self, hidden: Tensor) -> None:
        _send(hidden, self._states, self._stage + 1, self._sent_states)

    def receive_states(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _receive(torch.empty(shape, dtype=dtype, device=self._device), self._states, self._stage - 1)

    def send_gradient(self, gradient: Tensor) -> None:
        _send(gradient, self._gradients, self._stage - 1, self._sent_gradients)

    def receive_gradient(self, hidden: Tensor) -> Tensor:
        """Receives the gradient of hidden states that this stage has sent."""
        empty = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        return _receive(empty, self._gradients, self._stage + 1)

    def finish(self) -> None:
        """Waits for all sends at the end of a call."""
        for sent in (self._sent_states, self._sent_gradients):
            while sent:
                sent.popleft().work.wait()


def _send(tensor: Tensor, group: ProcessGroup, stage: int, sent: deque[_Send]) -> None:
    tensor = tensor.detach().contiguous()
    work = distributed.isend(tensor, group=group, group_dst=stage)
    assert work is not None, "this rank is a member of the group"
    sent.append(_Send(work, tensor))
    while len(sent) > MAX_UNFINISHED:
        sent.popleft().work.wait()


def _receive(empty: Tensor, group: ProcessGroup, stage: int) -> Tensor:
    work = distributed.irecv(empty, group=group, group_src=stage)
    assert work is not None, "this rank is a member of the group"
    work.wait()
    return empty
