"""Operations of CPUs and GPUs."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrl.devices.device import (
    Device,
    MemoryUsage,
    find_compiler_problem,
    get_device,
    packed_size,
    release_unused_memory,
    unpack_bytes,
    use_exact_float32,
)
from flowrl.devices.device_rates import find_peak_flops

MIB = 2**20
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "VLLM_BATCH_INVARIANT": "1",
}
GPU = pytest.param(
    "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.fixture(params=["cpu", GPU])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(name: str) -> Iterator[Device]:
    yield get_device(name)


def test_a_tensor_is_counted_as_allocated_memory(name: str, device: Device) -> None:
    device.begin_peak()
    before = device.memory()
    tensor = torch.ones(256 * MIB, dtype=torch.uint8, device=name)
    during = device.memory()
    del tensor
    release_unused_memory()
    after = device.memory()
    assert during.allocated - before.allocated == pytest.approx(256 * MIB, rel=0.1)
    assert during.allocated - after.allocated == pytest.approx(256 * MIB, rel=0.1)
    for memory in (before, during):
        assert 0 <= memory.allocated <= memory.peak <= memory.reserved <= memory.total
    # The memory of the peak has been returned to the device, so the reserved memory may be smaller than the peak.
    assert 0 <= after.allocated <= min(after.peak, after.reserved) <= max(after.peak, after.reserved) <= after.total
    assert all(0 <= memory.free < memory.total for memory in (before, during, after))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_needs_a_compiler_and_the_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = get_device("cpu")
    (tmp_path / "Python.h").touch()
    for name in ("compiler", "gcc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler_problem(cpu) is None
    monkeypatch.setenv("CC", "missing")
    assert "missing" in (find_compiler_problem(cpu) or "")
    monkeypatch.setenv("CC", "compiler")
    (tmp_path / "gcc").unlink()
    assert find_compiler_problem(cpu) is None
    monkeypatch.delenv("CC")
    assert "gcc" in (find_compiler_problem(cpu) or "")
    monkeypatch.setenv("CC", "compiler")
    (tmp_path / "Python.h").unlink()
    assert "Python.h" in (find_compiler_problem(cpu) or "")


def test_free_blocks_in_the_cache_of_torch_are_not_in_use_at_the_peak() -> None:
    """Of 80 GB, other processes use 15 GB, and the peak of this one is 25 GB."""
    assert MemoryUsage(allocated=10, peak=25, reserved=45, free=20, total=80).peak_fraction == pytest.approx(40 / 80)


def test_a_peak_begins_again(name: str, device: Device) -> None:
    device.begin_peak()
    tensor = torch.ones(256 * MIB, dtype=torch.uint8, device=name)
    del tensor
    if device.index is not None:
        assert device.memory().peak - device.memory().allocated >= 256 * MIB
    device.begin_peak()
    assert device.memory().peak <= device.memory().allocated + MIB


def test_random_numbers_continue_from_a_restored_state(name: str, device: Device) -> None:
    state = device.random_state()
    expected = torch.rand(4, device=name)
    device.restore_random_state(state)
    assert torch.equal(torch.rand(4, device=name), expected)


def test_offloaded_tensors_return_after_their_memory_was_reused(name: str, device: Device) -> None:
    """The second round reuses the host memory of the first, and needs more for the longest tensor."""
    for lengths in ((1000, 10), (10, 3000)):
        values = [torch.arange(n, device=name).to(dtype) for n in lengths for dtype in (torch.bfloat16, torch.int64)]
        expected = [value.cpu() for value in values]
        offloaded = [device.offload(value) for value in values]
        del values
        _ = [torch.full((n,), -1, device=name) for n in lengths]
        offloaded[0].prefetch()
        for moved, value in zip(offloaded, expected, strict=True):
            restored = moved.restore()
            assert restored.device == torch.device(name) and torch.equal(restored.cpu(), value)


def test_a_host_buffer_receives_the_copy_of_a_tensor(name: str, device: Device) -> None:
    tensor = torch.arange(200, dtype=torch.uint8, device=name)
    buffer = device.host_buffer(200)
    buffer.copy_(tensor, non_blocking=True)
    device.wait_for_stream()
    assert buffer.device.type == "cpu" and buffer.is_pinned() == (name != "cpu")
    assert buffer.tolist() == list(range(200))


def test_a_host_buffer_can_be_empty(device: Device) -> None:
    assert device.host_buffer(0).numel() == 0


TENSORS = [
    torch.arange(3),
    torch.tensor([True, False, True]),
    torch.empty(0, 2),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.arange(12, dtype=torch.int32).view(3, 4).T,  # not contiguous
    torch.arange(5, dtype=torch.float64),
]
"""Tensors whose sizes are no multiples of the alignment."""


def test_tensors_share_a_buffer_without_overlapping() -> None:
    buffer = torch.zeros(packed_size(TENSORS), dtype=torch.uint8)
    parts = unpack_bytes(buffer, TENSORS)
    for part, tensor in zip(parts, TENSORS, strict=True):
        part.copy_(tensor)
    for part, tensor in zip(parts, TENSORS, strict=True):
        assert part.dtype == tensor.dtype and part.shape == tensor.shape and torch.equal(part, tensor)
        assert (part.data_ptr() - buffer.data_ptr()) % 16 == 0 or not part.numel()
    assert len(buffer) == 2 * 16 + 16 + 0 + 16 + 48 + 48


def test_sent_tensors_return_unchanged(name: str, device: Device) -> None:
    sent = device.send(TENSORS)
    assert all(str(tensor.device) == name for tensor in sent)
    wait = device.fetch({str(index): tensor for index, tensor in enumerate(sent)})
    for fetched, tensor in zip(wait().values(), TENSORS, strict=True):
        assert fetched.device.type == "cpu" and fetched.dtype == tensor.dtype and torch.equal(fetched, tensor)


def test_a_host_buffer_is_not_reused_before_its_copy_is_done(name: str, device: Device) -> None:
    """Many copies are in flight, after an operation that takes long on a GPU."""
    busy = torch.rand(2048, 2048, device=name)
    for _ in range(4 if name == "cpu" else 100):
        busy = busy @ busy
    sent = [device.send([torch.full((100_000,), float(i))])[0] for i in range(50)]
    assert [tensor.mean().item() for tensor in sent] == list(range(50))


def test_a_device_without_an_index_is_the_current_one(name: str, device: Device) -> None:
    same = get_device(torch.device(name).type)
    assert (same.id, same.index, same.capability) == (device.id, device.index, device.capability)


def test_deterministic_operations_do_not_start_cuda(monkeypatch: pytest.MonkeyPatch, default_algorithms: None) -> None:
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    get_device("cpu").make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] (as in the device)
    assert os.environ.keys().isdisjoint(DETERMINISTIC), "vLLM has no batch-invariant mode on CPUs"
    get_device("cuda:3").make_deterministic()
    assert os.environ.items() >= DETERMINISTIC.items()
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_driver_describes_its_gpu_without_a_cuda_context() -> None:
    code = (
        "import torch; from flowrl.run.replay.recording import describe_machine\n"
        "assert describe_machine()['gpu'] and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, tflops: float) -> None:
    assert find_peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA L40", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_other_devices_have_no_peak(name: str) -> None:
    assert find_peak_flops(name) is None


def test_float32_products_do_not_use_tf32() -> None:
    defaults = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        use_exact_float32()
        assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = defaults
