"""`engine.offload_activations`: the saved inputs of layers leave the device, and all gradients are the same."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.config import EngineConfig, LoraConfig
from flowrl.devices.device import CpuDevice, get_device
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.parallel.rank_mesh import RankMesh
from flowrl.engines.parallel.sharding import EngineError, layers
from flowrl.engines.rollout.hf.kv_cache import with_slot_attention
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp import activation_offload
from flowrl.engines.train.fsdp.activation_offload import offload_inputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.layer_trace import _LiveBytes
from flowrl.engines.train.microbatch import MicroBatch
from tests.benchmarks.gpu.engines import one_rank_mesh
from tests.engines.closeness import assert_norm_close
from tests.engines.copying_device import CopyingDevice, offload_to
from tests.engines.offload_ranks import CASES as RANK_CASES
from tests.engines.offload_ranks import main
from tests.engines.strategies import OPTIMIZER, POLICY, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import qwen2
from tests.errors import rejects
from tests.processes import run_ranks

NUM_LAYERS = 4
CASES: dict[str, dict[str, Any]] = {
    "packed rows": {},
    "padded rows": {"packing": "never"},
    "autocast": {"compute_dtype": "bfloat16"},
    "fsdp": {"strategy": "fsdp"},
    "an adapter": {"lora": LoraConfig(rank=4)},
}
"""Name -> settings of the engine."""

PASS = [("out", 0), ("out", 1), ("out", 2)]
PASS += [("back", 2), ("use", 2), ("back", 1), ("use", 1), ("back", 0), ("use", 0)]
"""Copies of a micro-batch. The input of the fourth layer stays; during its backward pass, that of the third returns."""


@pytest.fixture(autouse=True)
def without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)


@pytest.fixture
def mesh() -> Iterator[RankMesh]:
    with one_rank_mesh(torch.device("cpu")) as mesh:
        yield mesh


def make_engine(mesh: RankMesh, lora: LoraConfig | None = None, **settings: Any) -> FsdpEngine:
    model = qwen2(num_hidden_layers=NUM_LAYERS, initializer_range=0.1)
    if lora is not None:
        add_adapter(model, lora)
    settings = {"strategy": "single", "gradient_checkpointing": True, "max_tokens_per_microbatch": 20} | settings
    return FsdpEngine(PolicyModel(model), policy_outputs, OPTIMIZER, EngineConfig.model_validate(settings), mesh=mesh)


def make_offloading(device: CpuDevice, mesh: RankMesh, **settings: Any) -> FsdpEngine:
    engine = make_engine(mesh, **settings)
    offload_to(device, engine.language_model)
    return engine


def gradients(engine: FsdpEngine) -> list[Tensor]:
    engine.forward_backward(table(9), policy_loss, POLICY)
    return [parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("case", CASES)
def test_offloaded_inputs_give_bitwise_the_same_gradients(mesh: RankMesh, case: str) -> None:
    plain, device = make_engine(mesh, **CASES[case]), CopyingDevice()
    expected = gradients(plain)
    actual = gradients(make_offloading(device, mesh, **CASES[case]))
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    num_micros, rest = divmod(len(device.events), len(PASS))
    assert num_micros > 1 and rest == 0
    expected_events = [(event, number + 3 * micro) for micro in range(num_micros) for event, number in PASS]
    assert device.events == expected_events


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # torch's
def test_offloaded_inputs_give_the_same_gradients_in_compiled_layers(mesh: RankMesh) -> None:
    torch._dynamo.reset()
    expected, device = gradients(make_engine(mesh, compile=True)), CopyingDevice()
    actual = gradients(make_offloading(device, mesh, compile=True))
    assert all(map(torch.equal, actual, expected)) and device.events[: len(PASS)] == PASS


def test_the_setting_offloads_inputs(mesh: RankMesh) -> None:
    expected = gradients(make_engine(mesh))
    engine = make_engine(mesh, offload_activations=True)
    assert all(map(torch.equal, gradients(engine), expected))
    checkpoints: list[Any] = [layer._gradient_checkpointing_func for layer in layers(engine.language_model)]
    assert all(isinstance(run.func.__self__, activation_offload._InputOffload) for run in checkpoints)


class MeasuredDevice(CopyingDevice):
    """Does not count the copies in host memory as memory of the device."""

    def __init__(self, live: _LiveBytes) -> None:
        super().__init__()
        self._live = live

    def in_host_memory(self, tensor: Tensor) -> Tensor:
        copy = super().in_host_memory(tensor)
        num_bytes = self._live.bytes
        self._live.ignore(copy)
        assert num_bytes - self._live.bytes == copy.nbytes
        return copy


def bytes_after_forward(*, offloads: bool) -> tuple[int, int]:
    """Returns the bytes that a forward pass of all layers keeps, and the number of tokens of its micro-batch."""
    live, kept = _LiveBytes(), []

    def outputs(model: nn.Module, micro: MicroBatch, requested: Outputs) -> dict[str, Tensor]:
        assert isinstance(model, PolicyModel)
        with live:
            body: Any = model.language_model.model
            hidden = body(micro.input_ids, use_cache=False).last_hidden_state
            kept.append((live.bytes, micro.input_ids.numel()))
        return {"values": hidden.sum(-1)}

    model = qwen2(num_hidden_layers=NUM_LAYERS)
    config = EngineConfig(strategy="single", gradient_checkpointing=True, packing="never")
    engine = FsdpEngine(PolicyModel(model), outputs, OPTIMIZER, config)
    if offloads:
        offload_to(MeasuredDevice(live), model)
    engine.forward_backward(
        table(9), lambda values, *_: (values["values"].sum(), {}), Outputs(("values",), "response_mask")
    )
    (result,) = kept
    return result


def test_the_inputs_of_all_layers_but_the_last_leave_the_device() -> None:
    """An input has 64 float32 numbers per token."""
    kept, num_tokens = bytes_after_forward(offloads=False)
    moved, _ = bytes_after_forward(offloads=True)
    assert kept - moved == (NUM_LAYERS - 1) * num_tokens * 64 * 4


def test_weights_parts_and_small_tensors_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 16)
    model, device = qwen2(), CopyingDevice()
    offload = activation_offload._InputOffload(model, device)
    weight, states = model.model.norm.weight, torch.ones(3, 4, requires_grad=True) * 2
    inputs = (weight, weight.detach(), weight.view(8, 8), states, states[:2], torch.ones(3))

    def layer(*tensors: Tensor) -> Tensor:
        return sum((tensor.square().sum() for tensor in tensors), torch.zeros(()))

    run = partial(checkpoint, use_reentrant=False)
    offload.run(run, True, False, layer, *inputs).backward()
    assert device.offloaded == [states.shape] and device.events == [("out", 0), ("back", 0), ("use", 0)]
    assert weight.grad is not None and torch.equal(weight.grad, 4 * weight)  # without the detached copy


def test_a_failed_loss_leaves_no_input_to_return(mesh: RankMesh) -> None:
    device = CopyingDevice()
    engine = make_offloading(device, mesh)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward_backward(table(9), fail, POLICY)
    assert device.events == PASS[:3]
    assert all(map(torch.equal, gradients(engine), gradients(make_engine(mesh))))


def test_a_rollout_can_copy_the_modules_of_the_model(mesh: RankMesh) -> None:
    engine = make_offloading(CopyingDevice(), mesh)
    copy: Any = with_slot_attention(engine.language_model)
    own: Any = engine.language_model
    assert copy is not own and copy.model.layers[0].mlp.up_proj.weight is own.model.layers[0].mlp.up_proj.weight


def test_layers_without_checkpoints_of_their_own_are_rejected() -> None:
    with rejects("engine.offload_activations", "Qwen2ForCausalLM", error=EngineError):
        offload_inputs(qwen2(), [nn.Linear(2, 2)], CpuDevice())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Returns the results of two processes, each by case."""
    folder: Path = tmp_path_factory.mktemp("offload")
    run_ranks(main, (folder,), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks_train_bitwise_the_same_weights(results: list[dict], case: str) -> None:
    for rank in range(2):
        (expected, none), (actual, copies) = results[rank][case]
        assert all(map(torch.equal, actual, expected)) and not none
        assert copies.count("out") == copies.count("use") > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_needs_less_memory_for_the_same_gradients() -> None:
    """Inputs of eight layers have over 4,096 tokens of 512 float32 numbers: 8 MiB each. At most two stay."""
    found, device, before = [], get_device("cuda:0"), 0
    for offloads in (False, True):
        model = qwen2(num_hidden_layers=8, hidden_size=512, initializer_range=0.02)
        config = EngineConfig(strategy="single", gradient_checkpointing=True, offload_activations=offloads)
        engine = FsdpEngine(PolicyModel(model), policy_outputs, OPTIMIZER, config, device="cuda:0")
        for _ in range(2):  # the second pass reuses the buffers of the first
            before = device.memory().allocated
            device.begin_peak()
            engine.forward_backward(table(600, longest=14), policy_loss, POLICY)
        own = [parameter.grad.cpu() for parameter in engine.model.parameters() if parameter.grad is not None]
        found.append((own, device.memory().peak - before))
    assert_norm_close(found[1][0], found[0][0])
    assert found[0][1] - found[1][1] > 4 * 8 * 2**20
