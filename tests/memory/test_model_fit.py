"""What a model's configuration alone refuses; tests/engines/models/test_families.py has what its engine would say."""

from pathlib import Path

import pytest
from transformers import GPT2Config, PreTrainedConfig, Qwen2Config

from flowrl.config import ActorConfig, ConfigError, LoraConfig, ModelConfig, OptimizerConfig, Placement
from flowrl.config import RolePlacement as Role
from flowrl.run.preflight import plan_run
from tests.run.test_preflight import ActorRun

QWEN = Qwen2Config(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
)


def planned(folder: Path, config: PreTrainedConfig, lora: LoraConfig | None = None, **sizes: int) -> None:
    config.save_pretrained(folder)
    actor = ActorConfig(model=ModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-4), lora=lora)
    role = Role.model_validate({"pool": "main"} | sizes)
    placement = Placement(device="cpu", pools={"main": [12]}, roles={"actor": role})
    plan_run(ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"tp": 4}, r"roles\.actor has tp 4, which does not divide the model's 6 attention heads: set tp to a divisor"),
        ({"tp": 6}, r"has tp 6, which does not divide the model's 2 heads of keys"),
        ({"sp": 4}, r"roles\.actor has sp 4, but the model has 6 attention heads and 2 of keys"),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused(tmp_path: Path, sizes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        planned(tmp_path, QWEN, **sizes)


def test_a_family_without_a_plan_is_refused_tp(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tensor-parallel plan for gpt2: remove tp, and cut the model with"):
        planned(tmp_path, GPT2Config(n_embd=32, n_layer=1, n_head=2), tp=2)


def test_an_adapter_on_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"actor\.lora\.targets names query, which is no inner linear layer of qwen2:"
    ):
        planned(tmp_path, QWEN, LoraConfig(rank=4, targets=("q_proj", "query")))


@pytest.mark.parametrize(
    ("lora", "sizes"),
    [
        (None, {"tp": 2}),
        (None, {"sp": 6}),
        (LoraConfig(rank=4, targets=("q_proj", "mlp.down_proj")), {}),
        (LoraConfig(rank=4), {"tp": 2}),
    ],
)
def test_what_fits_is_planned(tmp_path: Path, lora: LoraConfig | None, sizes: dict) -> None:
    planned(tmp_path, QWEN, lora, **sizes)


def test_a_model_that_is_not_there_is_left_to_who_loads_it(tmp_path: Path) -> None:
    actor = ActorConfig(model=ModelConfig(path=tmp_path / "no"), optimizer=OptimizerConfig(lr=1e-4))
    placement = Placement(device="cpu", pools={"main": [4]}, roles={"actor": Role(pool="main", tp=4)})
    plan_run(ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor))
