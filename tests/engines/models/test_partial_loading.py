"""Models whose files lack weights or have unexpected weights."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2ForSequenceClassification,
)

from flowrl.config import EngineConfig, ModelConfig
from flowrl.engines.models.loading import ModelError, find_differences, load_critic, load_policy, load_reward_model
from flowrl.engines.models.sharded_loading import load_shards
from flowrl.engines.models.weights import export_weights
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.tiny import SIZES, classifier, llama, qwen2, save
from tests.processes import run_ranks

NORM, QUERY, UP = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
EXTRA = "model.layers.7.mlp.up_proj.weight"


def changed(model: PreTrainedModel, folder: Path, *lacking: str, extra: tuple[str, ...] = ()) -> Path:
    """Saves a model without some weights, and with unexpected weights."""
    save(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if name not in lacking}
    weights |= {name: torch.ones(2) for name in extra}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def partial(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> ModelConfig:
    return ModelConfig(path=folder, strict=False, dtype=dtype)


def loaded(folder: Path, on_meta: bool, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, Tensor]:
    model = load_policy(partial(folder, dtype), on_meta=on_meta)
    load_shards(model, torch.device("cpu"))
    return dict(model.named_parameters())


@pytest.mark.parametrize("on_meta", [False, True])
def test_missing_and_unknown_weights_are_rejected_with_their_names(tmp_path: Path, on_meta: bool) -> None:
    folder = changed(llama(), tmp_path, NORM, QUERY, extra=(EXTRA, "other"))
    with pytest.raises(ModelError) as caught:
        load_policy(ModelConfig(path=folder), on_meta=on_meta)
    message = str(caught.value)
    assert all(fact in message for fact in (str(folder), NORM, QUERY, EXTRA, "other", "model.strict: false"))
    assert "\n" not in message


def test_a_message_has_few_of_many_names_and_their_number(tmp_path: Path) -> None:
    names = [name for name, _ in llama().named_parameters() if ".layers." in name]
    with pytest.raises(ModelError) as caught:
        load_policy(ModelConfig(path=changed(llama(), tmp_path, *names)))
    assert sum(name in str(caught.value) for name in names) == 3
    assert f"{len(names) - 3} more" in str(caught.value)


@pytest.mark.parametrize("on_meta", [False, True])
def test_missing_weights_get_initial_values_and_the_others_those_of_the_files(tmp_path: Path, on_meta: bool) -> None:
    folder = changed(llama(), tmp_path, NORM, QUERY, extra=(EXTRA,))
    weights, stored = loaded(folder, on_meta), load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], stored[name]) for name in weights.keys() - {NORM, QUERY})
    assert torch.equal(weights[NORM], torch.ones(32))
    # 1024 draws from a normal distribution of deviation 0.3 (`initializer_range`): 3 standard errors are 7 %.
    assert weights[QUERY].numel() == 1024 and weights[QUERY].std().item() == pytest.approx(0.3, rel=0.07)


def test_initial_values_depend_only_on_the_name(tmp_path: Path) -> None:
    one = loaded(changed(llama(), tmp_path / "one", QUERY), True)
    torch.manual_seed(1)
    several = loaded(changed(llama(seed=1), tmp_path / "several", NORM, QUERY, UP), False)
    assert torch.equal(one[QUERY], several[QUERY])
    other = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(loaded(changed(llama(), tmp_path / "other", other), True)[other], one[QUERY])
    rounded = loaded(changed(llama(), tmp_path / "half", QUERY), True, "bfloat16")
    assert torch.equal(rounded[QUERY], one[QUERY].bfloat16())


@pytest.mark.parametrize("on_meta", [False, True])
def test_loading_draws_no_random_numbers_of_the_process(tmp_path: Path, on_meta: bool) -> None:
    folder, state = changed(llama(), tmp_path, QUERY), torch.get_rng_state()
    loaded(folder, on_meta)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_weight_that_its_layer_does_not_initialize_has_the_scale_of_the_model(tmp_path: Path) -> None:
    """GPT-2 initializes the output layer of a block in the block: 0.02 / sqrt(2 layers of 2 residuals)."""
    torch.manual_seed(0)
    settings = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    name = "transformer.h.0.mlp.c_proj.weight"
    weight = loaded(changed(GPT2LMHeadModel(settings), tmp_path, name), True)[name]
    assert weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)


def test_a_tied_weight_is_reported_once(tmp_path: Path) -> None:
    folder = changed(qwen2(), tmp_path, "model.embed_tokens.weight")
    assert find_differences("policy", partial(folder)).missing == ("model.embed_tokens.weight",)
    weights = load_policy(partial(folder))
    assert weights.get_parameter("lm_head.weight") is weights.get_parameter("model.embed_tokens.weight")
    embeddings = loaded(folder, True)["model.embed_tokens.weight"]
    assert torch.equal(embeddings, weights.get_parameter("lm_head.weight"))


def test_a_critic_ignores_heads_but_no_unknown_weight_of_its_backbone(tmp_path: Path) -> None:
    load_critic(ModelConfig(path=changed(llama(), tmp_path / "head", extra=("classifier.bias",))))
    with pytest.raises(ModelError, match=EXTRA):
        load_critic(ModelConfig(path=changed(llama(), tmp_path / "layer", extra=(EXTRA,))))
    load_critic(partial(tmp_path / "layer"))


def test_a_policy_rejects_the_files_of_a_reward_model(tmp_path: Path) -> None:
    folder = save(classifier(), tmp_path)
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_policy(ModelConfig(path=folder))
    assert find_differences("policy", partial(folder)).unexpected == ("score.weight",)


def test_a_trained_head_does_not_score_with_untrained_weights(tmp_path: Path) -> None:
    folder = changed(classifier(), tmp_path, QUERY)
    with pytest.raises(ModelError, match=QUERY):
        load_reward_model(partial(folder))
    assert isinstance(load_reward_model(partial(folder), head="fresh").model, Qwen2ForSequenceClassification)


def test_a_missing_head_is_rejected_without_strict(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"score\.weight.*head: fresh"):
        load_reward_model(partial(save(qwen2(), tmp_path)))


def test_a_missing_expert_is_rejected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, hidden_size=32, num_local_experts=2))
    folder = changed(model, tmp_path, "model.layers.0.block_sparse_moe.experts.1.w1.weight")
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_policy(partial(folder))


def test_other_shapes_are_rejected_without_strict(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    settings = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="shapes"):
        load_policy(partial(folder))


LAYOUTS = {"fsdp": {}, "tp": {"tp": 2}}


def load_on_ranks(rank: int, folder: Path) -> None:
    """Loads the model on two ranks, and writes its full weights."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, layout in LAYOUTS.items():
        mesh = rank_mesh(distributed.group.WORLD, device="cpu", **layout)
        model: nn.Module = PolicyModel(load_policy(partial(folder / "model"), on_meta=True))
        FsdpEngine(model, policy_outputs, None, EngineConfig(strategy="fsdp"), mesh=mesh)
        results[name] = {key: torch.from_numpy(array) for key, array in export_weights(model).items()}
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_initial_values_are_the_same_on_all_ranks_and_layouts(tmp_path: Path) -> None:
    expected = loaded(changed(llama(), tmp_path / "model", NORM, QUERY, UP, "lm_head.weight"), False)
    run_ranks(load_on_ranks, (tmp_path,), 2)
    for rank in range(2):
        for weights in torch.load(tmp_path / f"{rank}.pt").values():
            assert all(torch.equal(weights[f"language_model.{name}"], value) for name, value in expected.items())
