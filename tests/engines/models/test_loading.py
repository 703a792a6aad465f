import json
import re
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

from flowrl.config import ModelConfig
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.loading import (
    CriticModel,
    ModelError,
    load_critic,
    load_policy,
    load_reward_model,
)
from flowrl.engines.models.sharded_loading import load_shards, move_loaded
from tests.engines.closeness import assert_norm_close
from tests.engines.losses import policy_logits
from tests.engines.tiny import END, classifier, llama, qwen2, save
from tests.errors import rejects

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def config(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> ModelConfig:
    return ModelConfig(path=folder, dtype=dtype)


@pytest.mark.parametrize("build", [qwen2, llama])
def test_a_loaded_policy_equals_the_saved_one_in_evaluation_mode(build, tmp_path: Path):
    model = build()
    loaded = load_policy(config(save(model, tmp_path)))
    assert not loaded.training
    assert torch.equal(policy_logits(loaded, IDS), policy_logits(model, IDS))


def test_the_dtype_is_that_of_the_config(tmp_path: Path):
    assert load_policy(config(save(qwen2(), tmp_path), "bfloat16")).dtype == torch.bfloat16


def test_weights_stay_when_their_file_is_rewritten_in_place(tmp_path: Path):
    folder = save(qwen2(), tmp_path)
    loaded = move_loaded(load_policy(config(folder)), torch.device("cpu"))
    logits, size = policy_logits(loaded, IDS), (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(size))
    assert torch.equal(policy_logits(loaded, IDS), logits)
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = save(qwen2(), tmp_path)
    capfd.readouterr()
    load_policy(config(folder))
    load_critic(config(folder))
    assert capfd.readouterr() == ("", "")


def test_padding_on_the_right_changes_no_real_position():
    model = qwen2()
    padded = torch.nn.functional.pad(IDS, (0, 3))
    assert_norm_close(policy_logits(model, padded)[:, :4], policy_logits(model, IDS))


def test_dropout_is_rejected_with_the_setting_that_overrides_it(tmp_path: Path):
    folder = save(qwen2(), tmp_path)
    settings = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"attention_dropout .*0\.1.*model\.dropout: 0"):
        load_policy(config(folder))


PUBLISHED = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32)),
    "OPT": lambda: OPTForCausalLM(
        OPTConfig(hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    ),
}
"""Tiny models with the dropout probabilities of the published configurations, which are transformers' defaults."""

DROPOUT = {"GPT-2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "OPT": ("dropout",)}


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_dropout_zero_overrides_a_published_configuration(tmp_path: Path, name: str, on_meta: bool):
    published = PUBLISHED[name]().eval()
    folder = save(published, tmp_path)
    with pytest.raises(ModelError) as rejected:
        load_policy(config(folder))
    assert all(setting in str(rejected.value) for setting in (*DROPOUT[name], "model.dropout: 0"))
    model = load_policy(ModelConfig(path=folder, dropout=0), on_meta=on_meta)
    assert all(model.config.to_dict()[setting] == 0 for setting in DROPOUT[name])
    load_shards(model, torch.device("cpu"))
    model.train()  # dropout would change the logits
    assert torch.equal(policy_logits(model, IDS), policy_logits(published, IDS))
    load_critic(ModelConfig(path=folder, dropout=0))
    load_reward_model(ModelConfig(path=folder, dropout=0), head="fresh")


def test_a_folder_without_a_model_is_rejected(tmp_path: Path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_policy(config(tmp_path))


def test_a_critic_starts_at_zero_on_any_language_model(tmp_path: Path):
    critic = load_critic(config(save(llama(), tmp_path)))
    assert torch.equal(critic(IDS), torch.zeros(2, 4))


def test_the_value_of_a_token_is_read_before_it():
    critic = CriticModel(qwen2().model)
    torch.nn.init.normal_(critic.value_head.weight)
    changed = IDS.clone()
    changed[:, 2] += 1
    differs = (critic(IDS) != critic(changed)).tolist()
    assert differs == [[False, False, False, True]] * 2
    assert critic(IDS)[:, 0].tolist() == [0.0, 0.0]


def test_a_saved_critic_is_loaded_with_its_head(tmp_path: Path):
    critic = load_critic(config(save(qwen2(), tmp_path / "policy")))
    torch.nn.init.normal_(critic.value_head.weight)
    save_model(critic, tmp_path / "policy", tmp_path / "critic")
    assert torch.equal(load_critic(config(tmp_path / "critic"))(IDS), critic(IDS))


def test_a_reward_is_read_at_the_last_token_of_each_row(tmp_path: Path):
    model = load_reward_model(config(save(classifier(), tmp_path)))
    alone = [model(IDS[:1, :2], torch.tensor([2])), model(IDS[1:], torch.tensor([4]))]
    assert_norm_close(model(IDS, torch.tensor([2, 4])), torch.cat(alone))


def test_a_language_model_is_rejected_as_a_reward_model(tmp_path: Path):
    with pytest.raises(ModelError, match=r"score\.weight.*head: fresh"):
        load_reward_model(config(save(qwen2(), tmp_path)))


def test_a_fresh_head_is_drawn_from_a_normal_of_variance_one_over_the_width_and_one(tmp_path: Path):
    folder = save(qwen2(hidden_size=2048, num_hidden_layers=1), tmp_path)
    weight = load_reward_model(config(folder), head="fresh").model.get_parameter("score.weight")
    critics = load_critic(config(folder), head="fresh").value_head
    assert weight.shape == (1, 2048) and torch.equal(weight, critics.weight) and critics.bias.item() == 0
    # The deviation of 2048 draws is within 5 % of the distribution's, their mean within 3 standard errors of 0.
    assert weight.std().item() == pytest.approx(2049**-0.5, rel=0.05)
    assert abs(weight.mean().item()) < 3 * 2049**-0.5 / 2048**0.5


def test_a_fresh_head_is_the_same_for_the_same_seed_only(tmp_path: Path):
    folder, lengths = config(save(qwen2(), tmp_path)), torch.tensor([4, 4])
    first, again = (load_reward_model(folder, head="fresh")(IDS, lengths) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, load_reward_model(folder, head="fresh", seed=1)(IDS, lengths))


def test_a_saved_reward_model_has_its_head(tmp_path: Path):
    model = load_reward_model(config(save(qwen2(), tmp_path / "policy")), head="fresh")
    lengths = torch.tensor([2, 4])
    save_model(model, tmp_path / "policy", tmp_path / "reward")
    assert torch.equal(load_reward_model(config(tmp_path / "reward"))(IDS, lengths), model(IDS, lengths))


def test_transformers_loads_a_saved_policy_and_its_tokenizer(tmp_path: Path):
    policy = load_policy(config(save(qwen2(), tmp_path / "start")))
    save_model(policy, tmp_path / "start", tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert torch.equal(loaded(IDS).logits, policy_logits(policy, IDS))
    assert AutoTokenizer.from_pretrained(tmp_path / "end").eos_token_id == END
    assert load_file(tmp_path / "end" / "model.safetensors")


def test_a_saved_model_is_not_overwritten(tmp_path: Path):
    folder = save(qwen2(), tmp_path / "start")
    with pytest.raises(ModelError, match=str(folder)):
        save_model(qwen2(), folder, folder)
    save_model(qwen2(), folder, folder, is_writer=False)  # a non-writing rank after the writer


def test_the_example_of_the_documentation_runs(tmp_path: Path):
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder, output = save(PUBLISHED["GPT-2"](), tmp_path / "start"), tmp_path / "output"
    exec(example, {"folder": folder, "output": output})
    assert load_policy(config(output)).config.to_dict()["resid_pdrop"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_weight_that_is_not_finite_is_named_with_its_file(tmp_path: Path, value: float, is_sharded: bool) -> None:
    model = llama()
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, :2] = value
    folder = save(model, tmp_path)
    with rejects("model.layers.0.mlp.up_proj.weight", 2) as caught:
        load_shards(load_policy(config(folder), on_meta=is_sharded), torch.device("cpu"))
    assert str(folder) in str(caught.value)


def test_a_value_head_that_is_not_finite_is_named_with_its_file(tmp_path: Path) -> None:
    critic = load_critic(config(save(llama(), tmp_path / "policy")))
    torch.nn.init.constant_(critic.value_head.bias, float("nan"))
    save_model(critic, tmp_path / "policy", tmp_path / "critic")
    with rejects("score.bias", 1) as caught:
        load_critic(config(tmp_path / "critic"))
    assert str(tmp_path / "critic" / "model.safetensors") in str(caught.value)


def test_large_finite_weights_are_accepted(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[:2] = torch.finfo(torch.float32).max
    load_policy(config(save(model, tmp_path)))
