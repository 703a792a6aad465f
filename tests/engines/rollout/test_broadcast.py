"""Broadcast of weights with gloo, which stands for NCCL. Senders and receivers are threads of this process."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flowrl.devices import device as devices
from flowrl.engines.models.weights import find_rows
from flowrl.engines.rollout.broadcast import BroadcastReceiver, BroadcastSender, TransferGroup
from flowrl.engines.rollout.weight_metadata import WeightMetadata
from tests.devices.recorded_device import RecordedDevice
from tests.engines.rollout.test_cuda_ipc import DTYPES, bits, describe, random_bits

CPU = torch.device("cpu")
Weights = list[tuple[str, Tensor]]


class Members:
    """Connected senders and receivers."""

    def __init__(self, num_senders: int, num_receivers: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.group = TransferGroup("127.0.0.1", listener.getsockname()[1], num_senders, num_receivers)
        self._threads = ThreadPoolExecutor(num_senders + num_receivers)
        senders = [
            self._threads.submit(BroadcastSender, self.group, index, CPU, None if index else listener)
            for index in range(num_senders)
        ]
        receivers = [self._threads.submit(BroadcastReceiver, self.group, index, CPU) for index in range(num_receivers)]
        self.senders = [sender.result() for sender in senders]
        self.receivers = [receiver.result() for receiver in receivers]

    def send(self, weights: Weights, metadata: WeightMetadata) -> list[Weights]:
        """Sends weights in parts. Returns the weights that each receiver has received."""
        count = len(self.senders)
        received = [self._threads.submit(receiver.receive, metadata) for receiver in self.receivers]
        for index, sender in enumerate(self.senders):
            self._threads.submit(sender.send, parts_of(weights, index, count), metadata).result()
        return [each.result() for each in received]


def parts_of(weights: Weights, index: int, count: int) -> Sequence[Tensor]:
    rows = [weight if count == 1 or weight.ndim else weight[None] for _, weight in weights]
    return rows if count == 1 else [each[slice(*find_rows(len(each), index, count))] for each in rows]


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (1, 3), (3, 1), (2, 2), (4, 3)])
def test_every_receiver_gets_the_parts_of_all_senders_bit_by_bit(num_senders: int, num_receivers: int) -> None:
    members = Members(num_senders, num_receivers)
    for seed in range(2):
        torch.manual_seed(seed)
        weights = [(f"{dtype} {shape}", random_bits(dtype, *shape)) for dtype in DTYPES for shape in ((7, 3), (2,), ())]
        received = members.send(weights, describe(weights))
        assert [bits(own) for own in received] == [bits(weights)] * num_receivers


def test_received_weights_do_not_change_with_the_next_bucket() -> None:
    members = Members(1, 1)
    first, second = ([("a", torch.full((3, 2), float(value)))] for value in (1, 2))
    ((_, kept),) = members.send(first, describe(first))[0]
    members.send(second, describe(second))
    assert kept.unique().tolist() == [1]


def test_weights_that_need_gradients_are_sent() -> None:
    weights = [("a", torch.ones(2, 2, requires_grad=True) * 3)]
    ((_, received),) = Members(1, 1).send(weights, describe(weights))[0]
    assert received.unique().tolist() == [3]


def test_a_call_ends_after_its_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    members, operations = Members(1, 1), list[str]()
    monkeypatch.setattr(devices, "_CPU", RecordedDevice(devices._CPU, operations.append))
    weights = [("a", torch.ones(2))]
    members.send(weights, describe(weights))
    assert operations == ["wait for stream"]
