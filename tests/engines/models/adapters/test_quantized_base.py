"""QLoRA: quantized frozen weights under an adapter."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flowrl.config import ActorConfig, BaseQuantization, LoraConfig, ModelConfig, OptimizerConfig, UserError
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.adapters.quantized_base import QuantizedLinear, round_to_codes
from flowrl.engines.models.adapters.saved_adapter import set_adapter
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weight_samples import weight_samples
from flowrl.engines.models.weights import full_weights, load_weights, to_arrays, write_weights
from flowrl.engines.rollout.weight_check import compare_model
from flowrl.engines.train.base import TrainContext
from flowrl.engines.train.fsdp.engine import FsdpEngine
from tests.engines.closeness import assert_norm_close
from tests.engines.models.adapters.test_lora import MODELS, logits
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import save

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, of the extra optimizers")

KINDS: tuple[BaseQuantization, ...] = ("nf4", "int8")
ERRORS = {"nf4": 0.12, "int8": 0.01}
"""Largest relative norm of the rounding errors of normally distributed weights."""


def engine_of(folder: Path, kind: BaseQuantization | None, steps: int = 0) -> FsdpEngine:
    """Returns an engine with a quantized model and an adapter, after some steps."""
    lora = LoraConfig(rank=4, alpha=8.0, base_quantization=kind)
    config = ActorConfig(model=ModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-2), lora=lora)
    engine = FsdpEngine.start(TrainContext("policy", config, torch.device("cpu"), None))
    for step in range(steps):
        engine.update(table(11, seed=step), policy_loss, POLICY)
    return engine


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(MODELS[request.param](), tmp_path / "start")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_close_weights_and_are_kept_by_a_second_rounding(kind: BaseQuantization) -> None:
    weight = torch.randn(32, 640, generator=torch.Generator().manual_seed(0))
    rounded = round_to_codes(weight, kind)
    assert 0 < (rounded - weight).norm() / weight.norm() < ERRORS[kind]
    blocks, most = (rounded.view(-1, 64), 16) if kind == "nf4" else (rounded, 256)
    assert max(len(block.unique()) for block in blocks) <= most
    assert_norm_close(round_to_codes(rounded, kind), rounded, 0.005)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [nn.Linear(64, 32), nn.Linear(64, 32, bias=False), Conv1D(32, 64)])
def test_a_layer_computes_the_product_with_the_dequantized_weight(
    layer: nn.Linear | Conv1D, kind: BaseQuantization
) -> None:
    quantized = QuantizedLinear(layer, layer.weight.detach(), kind)
    plain, weight = type(layer)(32, 64) if isinstance(layer, Conv1D) else nn.Linear(64, 32), quantized.dequantize()
    plain.weight = nn.Parameter(weight)
    plain.bias = layer.bias
    gradients: list[Tensor] = []
    for module in (quantized, plain):
        inputs = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = module(inputs)
        (outputs**2).sum().backward()
        assert inputs.grad is not None
        gradients += [outputs.detach(), inputs.grad]
    assert_norm_close(gradients[0], gradients[2])
    assert_norm_close(gradients[1], gradients[3])


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_keeps_the_codes_of_adapted_layers_and_all_other_weights(
    kind: BaseQuantization, folder: Path
) -> None:
    engine, plain = engine_of(folder, kind), dict(full_weights(load_policy(ModelConfig(path=folder))))
    model = engine.language_model
    layers = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert layers and {name for name, p in model.named_parameters() if p.is_meta} == {
        f"{name}.weight" for name in layers
    }
    merged = dict(engine.export_weights())
    quantized = {f"{name.removesuffix('.base_layer')}.weight" for name in layers}
    assert merged.keys() == plain.keys() and quantized <= merged.keys()
    for name, weight in merged.items():
        expected = round_to_codes(plain[name], kind) if name in quantized else plain[name]
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_an_adapter_on_the_dequantized_model(
    kind: BaseQuantization, folder: Path, tmp_path: Path
) -> None:
    rounded = load_policy(ModelConfig(path=folder))
    write_weights(rounded, engine_of(folder, kind).export_weights())
    quantized = engine_of(folder, kind, steps=3)
    plain = engine_of(save(rounded, tmp_path / "rounded"), None, steps=3)
    for (name, weight), (_, expected) in zip(quantized.export_adapter(), plain.export_adapter(), strict=True):
        assert_norm_close(weight, expected, 1e-3 if name.endswith("lora_A.weight") else 1e-2)
    assert_norm_close(logits(quantized.language_model), logits(plain.language_model), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_trained_policy(kind: BaseQuantization, folder: Path) -> None:
    engine = engine_of(folder, kind, steps=3)
    plain = load_policy(ModelConfig(path=folder))
    load_weights(plain, to_arrays(engine.export_weights()))
    assert_norm_close(logits(plain), logits(engine.language_model))
    # An export adds the adapter to the files of the base model.
    again = load_policy(ModelConfig(path=folder), on_meta=True)
    add_adapter(again, LoraConfig(rank=4, alpha=8.0, base_quantization=kind))
    set_adapter(again, dict(engine.export_adapter()))
    exported = dict(stream_full_weights(again))
    assert all(torch.equal(weight, exported[name]) for name, weight in engine.export_weights())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_only_the_adapter(kind: BaseQuantization, folder: Path) -> None:
    engine, other = engine_of(folder, kind, steps=2), engine_of(folder, kind)
    state = engine.save_state(with_optimizer=True)
    assert all(".lora_" in name for name in state)
    target = other.save_state(with_optimizer=True)
    for name, tensor in target.items():
        tensor.copy_(state[name])
    other.load_state(target, engine.counters())
    for each in (engine, other):
        each.update(table(11, seed=5), policy_loss, POLICY)
    assert torch.equal(logits(engine.language_model), logits(other.language_model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_has_the_sampled_weights_after_a_sync(kind: BaseQuantization, folder: Path) -> None:
    engine, rollout = engine_of(folder, kind, steps=1), load_policy(ModelConfig(path=folder))
    write_weights(rollout, engine.export_weights())
    for version in range(2):
        compared = compare_model(rollout, weight_samples(engine.language_model, version))
        assert compared.count and not compared.wrong and not compared.unreached


def test_a_weight_without_whole_blocks_is_rejected() -> None:
    with pytest.raises(UserError, match=r"lora\.base_quantization is nf4.*\[3, 5\].*int8"):
        round_to_codes(torch.ones(3, 5), "nf4")


def test_int8_codes_of_float64_weights_are_rejected(tmp_path: Path) -> None:
    model = {"path": tmp_path, "dtype": "float64"}
    settings = {"model": model, "optimizer": {"lr": 1.0}, "lora": {"rank": 4, "base_quantization": "int8"}}
    with pytest.raises(ValueError, match=r"lora\.base_quantization is int8.*model\.dtype: float64"):
        ActorConfig.model_validate(settings)


@pytest.mark.parametrize("engine", [{"strategy": "fsdp"}, {"offload": "idle"}, {"compile": True}])
def test_engine_settings_without_support_are_rejected(engine: dict[str, object], tmp_path: Path) -> None:
    settings = {"model": {"path": tmp_path}, "optimizer": {"lr": 1.0}, "lora": {"rank": 4, "base_quantization": "nf4"}}
    (name,) = engine
    with pytest.raises(ValueError, match=rf"lora\.base_quantization is nf4.*engine\.{name}"):
        ActorConfig.model_validate(settings | {"engine": engine})
