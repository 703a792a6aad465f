"""LoRA adapters: training, merging, saving and loading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from flowrl.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.adapters.lora import (
    LoraError,
    adapter_disabled,
    adapter_layers,
    adapter_state,
    add_adapter,
    model_weights,
    save_adapter,
)
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.weights import WeightsError, export_weights, gathered_weights, load_weights, meta_copy
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.closeness import assert_norm_close
from tests.engines.losses import policy_logits
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import VOCABULARY, table
from tests.engines.tiny import END, llama, qwen2, save, to_float64

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
LORA = LoraConfig(rank=4, alpha=8.0)


def gpt2(seed: int = 0) -> PreTrainedModel:
    """Returns a model with transposed weights and nonzero biases."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    settings |= {"initializer_range": 0.3, "eos_token_id": END, "bos_token_id": END}
    return with_biases(GPT2LMHeadModel(GPT2Config(**settings)))


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2, with biases of q, k and v": lambda: with_biases(qwen2()),
    "gpt2, with biases everywhere": gpt2,
    "llama, without biases": llama,
}


def trained(model: PreTrainedModel, config: LoraConfig = LORA, steps: int = 3) -> FsdpEngine:
    """Returns the model with an adapter, after some steps."""
    add_adapter(model, config)
    engine = FsdpEngine(PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-2), EngineConfig())
    for step in range(steps):
        engine.update(table(11, seed=step), policy_loss, POLICY)
    return engine


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return policy_logits(model, IDS)


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_changes_nothing_until_it_is_trained(name: str) -> None:
    model = MODELS[name]()
    before = logits(model)
    add_adapter(model, LORA)
    assert torch.equal(logits(model), before)
    for parameter, weight in model_weights(model).items():
        assert torch.equal(weight.gather(), MODELS[name]().state_dict()[parameter])


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_of_the_layers_has_an_adapter_and_the_head_has_none(name: str) -> None:
    model = MODELS[name]()
    matrices = [n for n, p in model.named_parameters() if p.ndim == 2 and (".h." in n or ".layers." in n)]
    add_adapter(model, LORA)
    assert sorted(f"{path}.weight" for path in adapter_layers(model)) == sorted(matrices)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_change_only_the_adapter(name: str) -> None:
    model = MODELS[name]()
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    start = logits(model)
    engine = trained(model)
    assert (logits(model) - start).abs().max() > 0.1
    stored = {n: weight.stored for n, weight in model_weights(model).items()}
    assert stored.keys() == before.keys() and all(torch.equal(stored[n], before[n]) for n in before)
    with adapter_disabled(engine.model):
        assert torch.equal(logits(model), start)
    assert (logits(model) - start).abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [0, 3])
def test_merged_weights_give_the_logits_of_model_and_adapter(name: str, steps: int) -> None:
    model, plain = (to_float64(MODELS[name]()) for _ in range(2))
    trained(model, steps=steps)
    load_weights(plain, export_weights(model))
    assert_norm_close(logits(plain), logits(model))


def test_a_merged_weight_is_the_weight_and_the_scaled_product() -> None:
    model = llama()
    trained(model)
    name, state = "model.layers.1.mlp.up_proj", adapter_state(model)
    a, b = (state[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    by_hand = llama().state_dict()[f"{name}.weight"] + 8 / 4 * b @ a
    assert_norm_close(model_weights(model)[f"{name}.weight"].gather(), by_hand)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_merge_changes_nothing(name: str) -> None:
    model = MODELS[name]()
    trained(model)
    plain, first = MODELS[name](), export_weights(model)
    load_weights(plain, first)
    once = logits(plain)
    load_weights(plain, export_weights(model))
    assert torch.equal(logits(plain), once)
    assert all((array == first[n]).all() for n, array in export_weights(model).items())


def test_weights_are_not_loaded_under_an_adapter() -> None:
    model = llama()
    add_adapter(model, LORA)
    with pytest.raises(WeightsError, match="adapter"):
        load_weights(model, export_weights(model))


def test_a_copy_has_merged_weights_and_shares_all_others() -> None:
    model = with_biases(qwen2())
    trained(model)
    copy = meta_copy(model)
    with gathered_weights(copy, model):
        assert_norm_close(logits(copy), logits(model))
        assert copy.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in copy.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_has_the_adapter_merged_and_keeps_its_biases(name: str, tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(path=save(MODELS[name](), tmp_path / "start")))
    trained(policy)
    save_model(policy, tmp_path / "start", tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert_norm_close(logits(loaded), logits(policy))
    start, end = MODELS[name]().state_dict(), loaded.state_dict()
    assert start.keys() == end.keys()
    biases = [n for n in start if n.endswith(".bias")]
    assert all(torch.equal(start[n], end[n]) for n in biases) and bool(biases) == ("without" not in name)
    assert not (tmp_path / "end" / "adapter_config.json").exists()


@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_a_saved_adapter_onto_the_base_model(name: str, tmp_path: Path) -> None:
    start = save(MODELS[name](), tmp_path / "start")
    policy = load_policy(ModelConfig(path=start))
    trained(policy)
    save_adapter(policy, start, tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(policy))
    theirs = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert theirs.keys() == adapter_state(policy).keys()


def test_a_saved_adapter_is_not_overwritten(tmp_path: Path) -> None:
    model = llama()
    add_adapter(model, LORA)
    with pytest.raises(LoraError, match=str(tmp_path)):
        save_adapter(model, tmp_path, tmp_path)
    save_adapter(model, tmp_path, tmp_path, is_writer=False)  # a non-writing rank after the writer


def test_an_adapter_has_the_same_initial_weights_in_every_process() -> None:
    first, second = llama(), llama()
    add_adapter(first, LORA)
    torch.rand(3)
    add_adapter(second, LORA)
    assert all(torch.equal(weight, adapter_state(second)[name]) for name, weight in adapter_state(first).items())
    assert all(not weight.any() for name, weight in adapter_state(first).items() if "lora_B" in name)


def test_only_the_adapter_is_trained_and_in_float32() -> None:
    model = qwen2(torch.bfloat16)
    add_adapter(model, LORA)
    trained_ones = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained_ones.items())
    assert {p.dtype for name, p in model.named_parameters() if name not in trained_ones} == {torch.bfloat16}
    assert sum(p.numel() for p in trained_ones.values()) == 2 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 96) * 3)


def test_only_named_layers_get_an_adapter() -> None:
    model = llama()
    add_adapter(model, LoraConfig(rank=2, targets=("q_proj", "mlp.up_proj")))
    assert list(adapter_layers(model)) == [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")
    ]


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "proj"])
def test_a_target_that_is_not_an_inner_linear_layer_is_rejected(target: str) -> None:
    with pytest.raises(LoraError, match=rf"lora\.targets .*\b{target}\b.*up_proj, v_proj$"):
        add_adapter(llama(), LoraConfig(rank=2, targets=(target,)))


def test_rslora_divides_the_scale_by_the_root_of_the_rank() -> None:
    model = llama()
    trained(model, LoraConfig(rank=4, alpha=8.0, rslora=True))
    name, state = "model.layers.1.mlp.up_proj", adapter_state(model)
    a, b = (state[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    by_hand = llama().state_dict()[f"{name}.weight"] + 8 / 4**0.5 * b @ a
    assert_norm_close(model_weights(model)[f"{name}.weight"].gather(), by_hand)


COMPLETE = LoraConfig(rank=4, alpha=8.0, modules_to_save=("lm_head", "model.norm"))


def test_complete_modules_are_trained_beside_the_adapter() -> None:
    model, before = llama(), llama().state_dict()
    trained(model, COMPLETE)
    changed = {name for name, weight in model_weights(model).items() if not torch.equal(weight.stored, before[name])}
    assert changed == {"lm_head.weight", "model.norm.weight"}
    assert {name for name in adapter_state(model) if ".lora_" not in name} == {
        "base_model.model.lm_head.weight",
        "base_model.model.model.norm.weight",
    }
    plain = llama()
    load_weights(plain, export_weights(model))
    assert_norm_close(logits(plain), logits(model))


def test_a_complete_module_has_no_matrices() -> None:
    model = llama()
    add_adapter(model, LoraConfig(rank=2, modules_to_save=("o_proj",)))
    assert all(".o_proj" not in path for path in adapter_layers(model)) and adapter_layers(model)
    assert model.get_parameter("model.layers.0.self_attn.o_proj.weight").requires_grad


@pytest.mark.parametrize(
    ("build", "module"), [(qwen2, "lm_head"), (llama, "model.norm")], ids=["tied", "a name that ends others"]
)
def test_complete_modules_are_trained_and_saved(
    build: Callable[[], PreTrainedModel], module: str, tmp_path: Path
) -> None:
    start = save(build(), tmp_path / "start")
    policy = load_policy(ModelConfig(path=start))
    trained(policy, LoraConfig(rank=4, alpha=8.0, modules_to_save=(module,)))
    save_adapter(policy, start, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(policy))
    name = f"{module}.weight"
    assert not torch.equal(policy.get_parameter(name), build().get_parameter(name))


@pytest.mark.parametrize("module", ["head", "weight", "model.lm_head"])
def test_a_module_that_does_not_exist_is_rejected(module: str) -> None:
    with pytest.raises(LoraError, match=rf"modules_to_save .*\b{module}\b.*lm_head"):
        add_adapter(llama(), LoraConfig(rank=2, modules_to_save=(module,)))
