"""Saved adapters as the start of a role: merged into its weights, or trained further."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from flowrl.config import LoraConfig, ModelConfig
from flowrl.engines.models.adapters.lora import LoraError, adapter_state, add_adapter, save_adapter
from flowrl.engines.models.adapters.saved_adapter import SavedAdapter
from flowrl.engines.models.loading import load_critic, load_policy, load_reward_model
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weights import full_weights
from tests.engines.closeness import assert_norm_close
from tests.engines.models.adapters.test_lora import LORA, MODELS, logits, trained
from tests.engines.tiny import llama, qwen2, save

COMPLETE = LoraConfig(rank=4, alpha=8.0, rslora=True, modules_to_save=("lm_head",))


def saved(tmp_path: Path, model: PreTrainedModel, lora: LoraConfig = LORA) -> tuple[PreTrainedModel, Path]:
    """Trains an adapter on a model in `tmp_path / "start"`, and saves it. Returns the trained policy and the folder."""
    start = save(model, tmp_path / "start")
    policy = load_policy(ModelConfig(path=start))
    trained(policy, lora)
    save_adapter(policy, start, tmp_path / "adapter")
    return policy, tmp_path / "adapter"


@pytest.mark.parametrize("lora", [LORA, COMPLETE], ids=["matrices", "rslora and a complete head"])
@pytest.mark.parametrize("name", MODELS)
def test_the_path_of_an_adapter_loads_the_trained_policy(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    policy, folder = saved(tmp_path, MODELS[name](), lora)
    config = ModelConfig(path=folder)
    assert (config.path, config.adapter) == (tmp_path / "start", folder)
    expected = dict(full_weights(policy))
    for loaded in (full_weights(load_policy(config)), stream_full_weights(load_policy(config, on_meta=True))):
        actual = dict(loaded)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in actual.items())


def test_a_merged_adapter_is_that_of_peft(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    theirs = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    assert_norm_close(logits(load_policy(ModelConfig(path=folder))), logits(theirs))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("lora", [LORA, COMPLETE], ids=["matrices", "rslora and a complete head"])
def test_an_adapter_is_trained_further(lora: LoraConfig, on_meta: bool, tmp_path: Path) -> None:
    policy, folder = saved(tmp_path, qwen2(), lora)
    again = load_policy(ModelConfig(path=folder), on_meta=on_meta, merges=False)
    add_adapter(again, lora)
    SavedAdapter.read(folder).continue_in(again)
    state, expected = adapter_state(again), adapter_state(policy)
    assert state.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in state.items())
    own = {name: weight for name, weight in again.named_parameters() if weight.requires_grad}
    assert {name for name in own if ".lora_" not in name} == (
        {"model.embed_tokens.weight"} if lora is COMPLETE else set()
    )


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=8, alpha=16.0),
        LoraConfig(rank=4, alpha=16.0),
        LoraConfig(rank=4, alpha=8.0, rslora=True),
        LoraConfig(rank=4, alpha=8.0, targets=("q_proj",)),
    ],
    ids=["rank", "alpha", "rslora", "targets"],
)
def test_other_settings_do_not_continue_an_adapter(lora: LoraConfig, tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama())
    model = load_policy(ModelConfig(path=folder), merges=False)
    add_adapter(model, lora)
    with pytest.raises(LoraError, match=f"lora .*{folder}.*remove lora"):
        SavedAdapter.read(folder).continue_in(model)


def test_complete_weights_are_trained_further_or_rejected(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama(), COMPLETE)
    model = load_policy(ModelConfig(path=folder), merges=False)
    add_adapter(model, COMPLETE.model_copy(update={"modules_to_save": ()}))
    with pytest.raises(LoraError, match="lm_head"):
        SavedAdapter.read(folder).continue_in(model)


def test_a_critic_starts_from_the_adapter_of_a_policy(tmp_path: Path) -> None:
    policy, folder = saved(tmp_path, llama(), COMPLETE)
    critic = load_critic(ModelConfig(path=folder))
    expected = {name.removeprefix("model."): weight for name, weight in full_weights(policy)}
    assert all(torch.equal(weight, expected[name]) for name, weight in critic.backbone.state_dict().items())


def test_a_reward_model_and_a_critic_get_the_head_of_an_adapter(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    base = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    base.config.pad_token_id = 0
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], modules_to_save=["score"])
    theirs = peft.get_peft_model(base, settings)
    for name, weight in theirs.named_parameters():
        if weight.requires_grad and "original" not in name:
            nn.init.normal_(weight)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    head = theirs.get_parameter("base_model.model.score.modules_to_save.default.weight")
    config = ModelConfig(path=start, adapter=tmp_path / "adapter")
    ids, lengths = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), torch.tensor([4, 4])
    expected = theirs.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.squeeze(1)
    for on_meta in (False, True):
        scorer = load_reward_model(config, on_meta=on_meta)
        weights = dict(stream_full_weights(scorer.model))
        assert torch.equal(weights["score.weight"], head)
    assert_norm_close(load_reward_model(config)(ids, lengths), expected)
    assert torch.equal(load_critic(config).value_head.weight, weights["score.weight"])


def changed(folder: Path, settings: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    """Changes settings or weights of an adapter in its files."""
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | (settings or {})))
    save_file(load_file(weights) | (tensors or {}), weights)
    return folder


LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "use_dora"),
        ({"bias": "all"}, {}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
        ({"peft_type": "IA3"}, {}, "peft_type IA3"),
        ({"lora_bias": True}, {}, "lora_bias"),
        ({"trainable_token_indices": [5]}, {}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, {}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights pissa"),
        ({"use_qalora": True}, {}, "use_qalora"),
        ({"a_setting_of_a_later_version": 3}, {}, "a_setting_of_a_later_version"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 32)}, "lora_embedding_A"),
        ({}, {LAYER.replace("A.weight", "B.bias"): torch.zeros(32)}, "B.bias"),
        ({}, {LAYER.replace("q_proj", "k_norm"): torch.zeros(4, 32)}, "k_norm.*pairs"),
        ({}, {"base_model.model.model.other.weight": torch.zeros(3)}, "model.other.weight"),
        ({"r": None}, {}, "cannot be read"),
        ({}, {LAYER: torch.full((4, 64), float("nan"))}, "NaN"),
    ],
    ids=[
        "dora",
        "bias",
        "pattern",
        "ia3",
        "biases of matrices",
        "tokens",
        "experts",
        "changed base",
        "qalora",
        "unknown setting",
        "embedding",
        "bias of b",
        "half a pair",
        "unknown",
        "no rank",
        "nan",
    ],
)
def test_other_adapters_are_rejected(
    settings: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    _, folder = saved(tmp_path, llama())
    with pytest.raises(Exception, match=message):
        load_policy(ModelConfig(path=changed(folder, settings, tensors)))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", [LAYER, LAYER.replace("layers.0", "layers.7"), "base_model.model.lm_head.weight"])
def test_an_adapter_of_another_model_is_rejected(name: str, on_meta: bool, tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama())
    tensors = {name: torch.zeros(4, 7), name.replace("lora_A", "lora_B"): torch.zeros(7, 4)}
    with pytest.raises(LoraError, match="base model of the adapter"):
        load_policy(ModelConfig(path=changed(folder, tensors=tensors)), on_meta=on_meta)


def test_a_folder_without_a_base_model_is_rejected(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama())
    with pytest.raises(ValueError, match="no base model"):
        ModelConfig(path=changed(folder, {"base_model_name_or_path": None}))
    assert ModelConfig(path=tmp_path / "start", adapter=folder).adapter == folder
    with pytest.raises(ValueError, match="adapter is set, too"):
        ModelConfig(path=folder, adapter=folder)


def test_the_tokenizer_of_an_adapter_is_used(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, llama())
    assert ModelConfig(path=folder).tokenizer_path == tmp_path / "start"
    (folder / "tokenizer_config.json").write_text("{}")
    assert ModelConfig(path=folder).tokenizer_path == folder
    assert ModelConfig(path=folder, tokenizer=tmp_path).tokenizer_path == tmp_path
