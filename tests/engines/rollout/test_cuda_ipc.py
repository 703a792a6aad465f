"""Memory that two processes share transfers weights bit for bit, on the CPU, and on a GPU if there is one."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.devices import device as devices
from flowrl.engines.models.weights import full_weights, weight_buckets, weight_shapes
from flowrl.engines.rollout import cuda_ipc
from flowrl.engines.rollout.cuda_ipc import IpcBucket, IpcSender, read_bucket
from flowrl.engines.rollout.weight_metadata import WeightMetadata
from tests.devices.recorded_device import RecordedDevice
from tests.engines.ipc_receiver import Receiver, start_receiver

CPU = torch.device("cpu")
GPU = pytest.param(
    torch.device("cuda", 0),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
)
MIB = 1024**2


@pytest.fixture(scope="module", params=[CPU, GPU], ids=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.fixture(scope="module")
def receiver(device: torch.device) -> Iterator[Receiver]:
    with start_receiver(device) as started:
        yield started


def describe(weights: list[tuple[str, Tensor]]) -> WeightMetadata:
    return WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in weights)


def test_a_bucket_is_shared_after_its_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[str] = []
    monkeypatch.setattr(devices, "_CPU", RecordedDevice(devices._CPU, operations.append))

    def read() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b"):
            operations.append(f"read {name}")
            yield name, torch.ones(2)

    sender, metadata = IpcSender(CPU), describe([("a", torch.ones(2)), ("b", torch.ones(2))])
    for _ in range(2):
        sender.share(read(), metadata)
    sender.release()
    copied = ["read a", "read b", "wait for stream"]
    assert operations == [*copied, "release ipc", *copied, "release ipc", "release cached"]


def bits(weights: list[tuple[str, Tensor]]) -> list[tuple[str, torch.dtype, tuple[int, ...], list[int]]]:
    return [
        (name, weight.dtype, tuple(weight.shape), weight.cpu().contiguous().flatten().view(torch.uint8).tolist())
        for name, weight in weights
    ]


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor of random bits, which may be infinities and NaN."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def test_a_merged_bucket_has_the_handles_of_all_ranks() -> None:
    metadata = describe([("a", torch.zeros(1))])
    buckets = [IpcBucket(metadata, {f"GPU-{rank}": (torch.zeros, (rank,))}) for rank in range(3)]
    merged = IpcBucket.merged(buckets)
    assert merged.handles == {f"GPU-{rank}": (torch.zeros, (rank,)) for rank in range(3)}
    assert merged.names == ("a",)


def test_torch_has_the_device_at_the_expected_position_of_a_handle() -> None:
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[cuda_ipc._DEVICE_INDEX] == "storage_device"


def test_every_dtype_and_shape_arrives_bit_for_bit(device: torch.device, receiver: Receiver) -> None:
    """After a weight of three bytes, the offsets of all weights are not multiples of their element sizes."""
    torch.manual_seed(0)
    weights = [("bytes", random_bits(torch.int8, 3))]
    weights += [(str(dtype), random_bits(dtype, 5, 3)) for dtype in DTYPES]
    weights += [("scalar", torch.tensor(1.5)), ("empty", torch.empty(0, 3)), ("transposed", torch.rand(3, 4).t())]
    sender = IpcSender(device)
    received = receiver.read(sender.share([(name, weight.to(device)) for name, weight in weights], describe(weights)))
    assert bits(received) == bits(weights)
    sender.release()


def test_weights_in_host_memory_are_sent_from_the_device(device: torch.device, receiver: Receiver) -> None:
    """An engine with `offload: parameters` has its weights in host memory."""
    weights, sender = [("a", torch.rand(7, 5))], IpcSender(device)
    assert bits(receiver.read(sender.share(weights, describe(weights)))) == bits(weights)
    sender.release()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_buckets_of_a_model_with_tied_weights_have_each_weight_once(
    device: torch.device, receiver: Receiver, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    model.to(device)  # pyright: ignore (transformers narrows `to`)
    sender, received = IpcSender(device), []
    buckets = weight_buckets(weight_shapes(model, dtype=dtype), 9000)
    for names in buckets:
        metadata = WeightMetadata.of(weight_shapes(model, names, dtype))
        assert sum(metadata.sizes) <= 9000
        received += receiver.read(sender.share(full_weights(model, names, dtype), metadata))
    sender.release()
    assert len(buckets) > 2
    expected = [(name, weight.to(dtype or weight.dtype)) for name, weight in model.named_parameters()]
    assert sorted(bits(received)) == sorted(bits(expected))


def test_a_received_weight_does_not_change_with_the_buffer() -> None:
    weights, sender = [("a", torch.arange(6.0)), ("b", torch.ones(3))], IpcSender(CPU)
    received = read_bucket(sender.share(weights, describe(weights)), CPU)
    assert sender._buffer is not None
    sender._buffer.zero_()
    assert bits(received) == bits(weights)


def test_twenty_updates_use_no_more_memory_than_one(device: torch.device, receiver: Receiver) -> None:
    sender, weights = IpcSender(device), [("a", torch.rand(MIB)), ("b", torch.rand(MIB))]
    uses = []
    for _ in range(20):
        for weight in weights:
            receiver.read(sender.share([weight], describe([weight])))
        sender.release()
        uses.append(used_bytes(device))
    assert max(uses) - uses[0] < MIB


def used_bytes(device: torch.device) -> int:
    """Returns the used memory of a GPU, or the shared memory that this process maps."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssShmem"))
