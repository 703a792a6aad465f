"""Host copies of tensors whose device memory is released. A CPU with a memory of its own stands for a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flowrl.devices.device import Device, get_device
from flowrl.devices.host_copies import HostCopies
from tests.devices.recorded_device import RecordedDevice

LARGE = 40_000
"""Number of float32 values, with which a tensor is copied only if it has changed."""
GPU = pytest.param(
    "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


class CountingDevice(RecordedDevice):
    """Counts the bytes that it saves."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, lambda _: None)
        self.copied = 0

    def copy_to_host(self, copies):
        self.copied += sum(source.nbytes for _, source in copies)
        return super().copy_to_host(copies)


@pytest.fixture(params=["cpu", GPU])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(name: str) -> CountingDevice:
    return CountingDevice(get_device(name))


def held(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_freed_tensors_hold_no_memory_until_they_are_restored(name: str, device: CountingDevice) -> None:
    tensors = [torch.randn(LARGE, device=name), torch.randn(7, 3, device=name), torch.arange(5, device=name)]
    expected = [tensor.clone() for tensor in tensors]
    copies = HostCopies(device)
    copies.offload(tensors)
    assert held(*tensors) == 0
    copies.onload()
    assert all(map(torch.equal, tensors, expected))


def test_tensors_that_share_memory_are_copied_once(name: str, device: CountingDevice) -> None:
    whole = torch.randn(4, LARGE, device=name)
    expected, copies = whole.clone(), HostCopies(device)
    copies.offload([whole[1], whole, nn.Parameter(whole[2:])])
    assert device.copied == expected.nbytes
    copies.onload()
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("change", "num_copied"),
    [
        (lambda weights: None, 1),
        (lambda weights: weights.data[0, 0].add_(1), 2),
        (lambda weights: weights[:2].copy_(weights[:2].flip(0)), 2),
        (lambda weights: weights.copy_(weights.roll(1, dims=1)), 2),
        (lambda weights: weights.view(-1)[-1].neg_(), 2),
        (lambda weights: weights.mul_(1), 1),
    ],
    ids=["nothing", "one value", "order of rows", "order of columns", "last value", "nothing, in place"],
)
def test_only_a_tensor_that_has_changed_is_copied_again(name: str, device: CountingDevice, change, num_copied) -> None:
    weights = torch.randn(2, LARGE + 3, dtype=torch.bfloat16, device=name)
    copies = HostCopies(device)
    for _ in range(2):
        copies.offload([weights])
        copies.onload()
    change(weights)
    expected = weights.clone()
    copies.offload([weights])
    copies.onload()
    assert torch.equal(weights, expected)
    assert device.copied == num_copied * weights.nbytes


def test_changes_that_a_digest_misses_are_copied_after_a_step(name: str, device: CountingDevice) -> None:
    """A digest adds words at a distance of 1,021, so that opposite changes of two of them cancel."""
    weights = torch.ones(LARGE, dtype=torch.float32, device=name)
    copies = HostCopies(device)
    copies.offload([weights])
    copies.onload()
    weights.view(torch.int32)[0] += 1
    weights.view(torch.int32)[1021] -= 1
    expected = weights.clone()
    copies.mark_changed([weights])
    copies.offload([weights])
    copies.onload()
    assert torch.equal(weights, expected)


def test_tensors_that_always_change_are_copied_without_a_comparison(name: str, device: CountingDevice) -> None:
    weights = torch.ones(2, LARGE, dtype=torch.float32, device=name)
    copies = HostCopies(device, compares=False)
    for _ in range(2):
        copies.offload([weights])
        copies.onload()
    assert torch.equal(weights, torch.ones(2, LARGE, device=name))
    assert device.copied == 2 * weights.nbytes


def test_a_tensor_that_changes_after_the_save_is_freed_with_its_last_content(name: str, device: CountingDevice) -> None:
    weights = torch.zeros(LARGE, device=name)
    copies = HostCopies(device)
    copies.start_copy([weights])
    assert held(weights) == weights.nbytes
    weights += 1
    copies.offload([weights])
    copies.onload()
    assert weights.unique().tolist() == [1]


def test_host_memory_is_allocated_once(name: str) -> None:
    operations: list[str] = []
    copies = HostCopies(RecordedDevice(get_device(name), operations.append))
    weights = [torch.zeros(LARGE, device=name), torch.zeros(3, device=name)]
    for _ in range(3):
        copies.offload(weights)
        copies.onload()
        weights[0] += 1
    assert operations.count("host buffer") == 1 and "unpin" not in operations
    copies.forget()
    assert operations[-1] == "unpin"


def test_memory_that_grows_gets_new_host_memory(name: str, device: CountingDevice) -> None:
    tensor = torch.zeros(3, device=name)
    copies = HostCopies(device)
    for size in (3, 50_000, 2):
        tensor.resize_(size).fill_(size)
        copies.offload([tensor])
        copies.onload()
        assert tensor.tolist() == [size] * size


def test_a_freed_tensor_can_be_read_from_host_memory(name: str, device: CountingDevice) -> None:
    whole = torch.randn(6, LARGE, device=name)
    expected, part, kept = whole.cpu().clone(), whole[2:5, 10:90], torch.ones(3, device=name)
    copies = HostCopies(device)
    copies.offload([torch.ones(5, device=name), part])
    read = copies.read(part)
    assert torch.equal(read, expected[2:5, 10:90])
    assert copies.read(kept) is kept
    read.zero_()
    copies.onload()
    assert torch.equal(whole.cpu(), expected)


def test_forgotten_tensors_stay_free(name: str, device: CountingDevice) -> None:
    tensor = torch.randn(LARGE, device=name)
    copies = HostCopies(device)
    copies.offload([tensor])
    copies.forget()
    copies.onload()
    assert held(tensor) == 0


def test_nothing_is_copied_on_a_cpu() -> None:
    tensor = torch.randn(LARGE)
    address, copies = tensor.data_ptr(), HostCopies(get_device("cpu"))
    copies.offload([tensor])
    assert tensor.data_ptr() == address != 0


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_the_shard_of_a_sharded_tensor_is_freed_read_and_restored(mesh: DeviceMesh) -> None:
    expected = torch.randn(8, LARGE)
    sharded = distribute_tensor(expected.clone(), mesh, [Shard(0)])
    copies = HostCopies(CountingDevice(get_device("cpu")))
    copies.offload([sharded])
    assert held(sharded.to_local()) == 0
    read = copies.read(sharded)
    assert isinstance(read, DTensor) and isinstance(sharded, DTensor)
    assert read.placements == sharded.placements
    assert torch.equal(read.full_tensor(), expected)
    copies.onload()
    assert torch.equal(sharded.full_tensor(), expected)
