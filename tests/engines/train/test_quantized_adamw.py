"""AdamW with moments of 8 bits: its memory, its steps, and its checkpoints on any number of ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowrl.config import OptimizerConfig
from flowrl.data.checksums import CheckpointError
from flowrl.devices import device as devices
from flowrl.engines.checkpoint.engine_checkpoint import load
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.module_engine import CODES, SCALE, split_quantized
from flowrl.engines.train.optimizers import build_optimizer, trained_weights
from tests.devices.recorded_device import RecordedDevice
from tests.engines import quantized_ranks
from tests.engines.closeness import assert_norm_close
from tests.engines.quantized_ranks import LAYOUTS, MODELS, engine_of, save, train
from tests.processes import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, of the extra optimizers"),
]


def optimizer_of(layer: nn.Module, kind: str = "adamw_8bit") -> torch.optim.Optimizer:
    return build_optimizer(trained_weights(layer), OptimizerConfig(kind=kind, lr=0.01, weight_decay=0.1))


def state_of(engine: FsdpEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.save_state(with_optimizer=True).items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_a_moment_of_a_matrix_has_a_byte_per_value_and_a_scale_per_64() -> None:
    layer = nn.Linear(128, 64)
    optimizer = optimizer_of(layer)
    for weight in layer.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        parts = split_quantized(optimizer.state[layer.weight][key])
        assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
            CODES: (torch.uint8, (64, 128)),
            SCALE: (torch.float32, (64, 2)),
        }
        assert list(split_quantized(optimizer.state[layer.bias][key])) == [""]


def test_the_matrices_of_all_experts_have_quantized_moments() -> None:
    engine = engine_of(model="experts")
    train(engine, 0)
    state = state_of(engine)
    for part, columns in (("gate_up_proj", 64), ("down_proj", 64)):
        name = f"optimizer.language_model.model.layers.0.mlp.experts.{part}.exp_avg"
        assert state[f"{name}{CODES}"].dtype == torch.uint8
        assert state[f"{name}{SCALE}"].shape == (*state[f"{name}{CODES}"].shape[:-1], columns // 64)


def test_updates_are_close_to_those_of_adamw() -> None:
    layers = [nn.Linear(128, 64) for _ in range(2)]
    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for layer, kind in zip(layers, ("adamw_8bit", "adamw"), strict=True):
        layer.weight.data.copy_(start)
        layer.bias.data.zero_()
        optimizer = optimizer_of(layer, kind)
        for step in range(3):
            for weight in layer.parameters():
                weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    own, exact = (layer.weight.detach() - start for layer in layers)
    # The step in which a moment is quantized uses its exact value. A code has a relative error of at most 1 / 16.
    assert_norm_close(own, exact, rtol=0.05)
    assert not torch.equal(own, exact)
    assert_norm_close(layers[0].bias.detach(), layers[1].bias.detach())


def test_a_resumed_engine_continues_bit_by_bit(tmp_path: Path) -> None:
    straight, again = engine_of(), engine_of()
    train(straight, 0, 1)
    save(straight, tmp_path / "saved")
    load(again, tmp_path / "saved")
    assert_equal(state_of(again), state_of(straight))
    for engine in (straight, again):
        train(engine, 2)
    assert_equal(state_of(again), state_of(straight))


def test_offloaded_moments_are_released_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with a memory of its own stands for a GPU."""
    monkeypatch.setattr(devices, "_CPU", RecordedDevice(devices._CPU, lambda _: None))
    straight, offloaded, again = engine_of(), engine_of(offload="optimizer"), engine_of(offload="optimizer")
    for engine in (straight, offloaded):
        train(engine, 0, 1)
    assert offloaded.optimizer is not None
    moments = [value for state in offloaded.optimizer.state.values() for value in state.values() if value.ndim]
    parts = [part for moment in moments for part in split_quantized(moment).values()]
    assert parts and all(part.untyped_storage().nbytes() == 0 for part in parts)
    save(offloaded, tmp_path / "saved")
    train(again, 0)  # its moments, too, are in host memory when the checkpoint replaces them
    load(again, tmp_path / "saved")
    for engine in (straight, again):
        train(engine, 2)
    assert_equal(state_of(again), state_of(straight))


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Returns checkpoints of one process, and of two ranks that have resumed from it."""
    root = tmp_path_factory.mktemp(request.param)
    engine = engine_of(model=request.param)
    train(engine, 0, 1)
    save(engine, root / "one")
    train(engine, 2)
    save(engine, root / "one-trained")
    run_ranks(quantized_ranks.main, (root, request.param), 2)
    return root


def folder_model(folder: Path) -> str:
    return "dense" if "dense" in folder.name else "experts"


def loaded(folder: Path) -> dict[str, Tensor]:
    engine = engine_of(model=folder_model(folder.parent))
    load(engine, folder)
    return state_of(engine)


def test_divided_models_have_the_moments_of_one_process(folder: Path) -> None:
    """Two shards, ranks with a part of the optimizer state, and two stages."""
    for layout in LAYOUTS[folder_model(folder)]:
        assert_equal(loaded(folder / f"{layout}-loaded"), loaded(folder / "one"))


def test_a_step_of_a_divided_model_is_close_to_that_of_one_process(folder: Path) -> None:
    before, expected = loaded(folder / "one"), loaded(folder / "one-trained")
    names = [name for name in before if name.startswith("model.")]
    for layout in LAYOUTS[folder_model(folder)]:
        own = loaded(folder / f"{layout}-trained")
        # A rounding error can change a code of a moment, but not the direction of a step.
        assert_norm_close(
            {name: own[name] - before[name] for name in names},
            {name: expected[name] - before[name] for name in names},
            0.01,
        )


@pytest.mark.parametrize("folder", ["dense"], indirect=True)
def test_a_layout_with_other_blocks_is_rejected(folder: Path) -> None:
    """The two tensor-parallel ranks have 32 columns of `o_proj`, which are less than a block."""
    with pytest.raises(CheckpointError, match=r"o_proj\.weight\.exp_avg"):
        loaded(folder / "tp")
