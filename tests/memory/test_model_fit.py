"""Parallel sizes and adapters are checked against the model's configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import GPT2Config, LlavaConfig, PreTrainedConfig, Qwen2Config

from flowrl.config import (
    ONE_DEVICE,
    ActorConfig,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    Placement,
    ReplicaSizes,
)
from flowrl.config import RolePlacement as Role
from flowrl.data.folders.input_paths import read_text_config
from flowrl.data.mixture import has_experts
from flowrl.memory.model_fit import (
    find_replica_problem,
    read_head_size,
    read_max_positions,
    read_num_token_ids,
)
from flowrl.memory.model_size import ModelSize, read_model_size
from tests.configs import plan_run
from tests.engines import tiny
from tests.engines.families import build
from tests.errors import missing_facts, rejects
from tests.hub_cache import make_snapshot
from tests.run.checks.test_placement_checks import ActorRun

QWEN = Qwen2Config(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
)


def check(folder: Path, config: PreTrainedConfig, lora: LoraConfig | None = None, **sizes: int) -> None:
    config.save_pretrained(folder)
    actor = ActorConfig(model=ModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-4), lora=lora)
    role = Role.model_validate({"pool": "main"} | sizes)
    placement = Placement(device="cpu", pools={"main": [12]}, roles={"actor": role})
    plan_run(ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor))


def read_model_size_of(folder: Path, config: PreTrainedConfig) -> ModelSize | None:
    config.save_pretrained(folder)
    return read_model_size(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hidden_size": 64, "num_attention_heads": 8}, 8),
        ({"hidden_size": 64, "num_attention_heads": 8, "head_dim": 32}, 32),
        ({"hidden_size": 64, "num_attention_heads": 8, "head_dim": None}, 8),
        ({"n_embd": 48, "n_head": 4}, 12),  # GPT-2
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, 16),
        ({"hidden_size": 64}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
    ],
)
def test_the_head_size_of_a_model(settings: dict[str, object], expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_head_size(tmp_path) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 64}, True),
        ({"text_config": {"num_experts": 8}}, True),
        ({"num_experts": 0}, False),
        ({"num_experts": None}, False),
        ({"hidden_size": 8}, False),
    ],
)
def test_a_mixture_of_experts_is_recognized(settings: dict[str, object], expected: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert has_experts(read_text_config(tmp_path)) is expected


def test_a_hub_model_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    settings = {"num_local_experts": 8, "max_position_embeddings": 128}
    (make_snapshot(tmp_path, "owner/experts") / "config.json").write_text(json.dumps(settings))
    model = Path("owner/experts")
    assert has_experts(read_text_config(model)) and read_max_positions(model) == 128


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ({"tp": 4}, ("placement.roles.actor.tp", 4, 6)),
        ({"tp": 6}, ("placement.roles.actor.tp", 6, 2)),
        ({"sp": 4}, ("placement.roles.actor.sp", 4, 6, 2)),
        ({"pp": 3}, ("placement.roles.actor.pp", 3, 2, "layers")),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_rejected(tmp_path: Path, sizes: dict, facts: tuple) -> None:
    with rejects(*facts, error=ConfigError):
        check(tmp_path, QWEN, **sizes)


@pytest.mark.parametrize(
    ("replica", "facts"),
    [
        (ReplicaSizes(tp=3), ["tp", 3, 4, "heads"]),
        (ReplicaSizes(pp=3), ["pp", 3, 2, "layers"]),
        (ReplicaSizes(tp=2, pp=2), []),
        (ReplicaSizes(tp=4), []),  # each of the 2 key heads is on two devices
        (ONE_DEVICE, []),
    ],
)
def test_a_replica_that_cannot_divide_the_model_is_named(replica: ReplicaSizes, facts: list, tmp_path: Path) -> None:
    """The model has 2 layers, 4 query heads and 2 key heads."""
    tiny.save(tiny.qwen2(), tmp_path)
    problem = find_replica_problem(tmp_path, replica)
    assert (problem is not None) == bool(facts)
    assert not missing_facts(problem or "", *facts)


def test_the_heads_of_gpt2_must_be_divisible_by_tp(tmp_path: Path) -> None:
    check(tmp_path, GPT2Config(n_embd=32, n_layer=1, n_head=2), tp=2)
    with rejects("placement.roles.actor.tp", 4, 2, "heads", error=ConfigError):
        check(tmp_path, GPT2Config(n_embd=32, n_layer=1, n_head=2), tp=4)


@pytest.mark.parametrize("family", ["DeepSeek-V3", "GPT-J", "Bloom", "Falcon"])
@pytest.mark.parametrize("name", ["tp", "sp", "pp"])
def test_families_of_unknown_size_are_checked_by_their_config(family: str, name: str, tmp_path: Path) -> None:
    config = build(family).config
    assert read_model_size_of(tmp_path, config) is None
    check(tmp_path, config, None, **({"tp": 2} if name == "tp" else {}))
    with rejects(f"placement.roles.actor.{name}", error=ConfigError):
        check(tmp_path, config, None, **{name: 3})


def test_targets_that_miss_a_pipeline_stage_are_rejected(tmp_path: Path) -> None:
    first = ("layers.0.self_attn.q_proj",)
    check(tmp_path, QWEN, LoraConfig(rank=4, targets=first))
    check(tmp_path, QWEN, LoraConfig(rank=4, targets=(*first, "layers.1.mlp.down_proj")), pp=2)
    check(tmp_path, QWEN, LoraConfig(rank=4, targets=(*first, "up_proj")), pp=2)
    with rejects("actor.lora.targets", "stage", 1, "placement.roles.actor.pp", error=ConfigError):
        check(tmp_path, QWEN, LoraConfig(rank=4, targets=first), pp=2)


def test_the_stages_of_a_critic_have_no_language_model_head(tmp_path: Path) -> None:
    """With the head of a policy, the last of two stages would have only the last of three layers."""
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    size = read_model_size_of(tmp_path, Qwen2Config(vocab_size=600, num_hidden_layers=3, **sizes))
    assert size is not None
    layers = [[tuple(stage) for stage in size.stages(2, has_head=has_head)] for has_head in (True, False)]
    assert layers == [[(0, 2), (2, 3)], [(0, 1), (1, 3)]]


def test_matrices_that_blocks_of_nf4_do_not_fill_are_rejected(tmp_path: Path) -> None:
    """The matrices of attention have 48 x 48 and 48 x 16 values, and those of the MLP 48 x 90."""
    check(tmp_path, QWEN, LoraConfig(rank=4, targets=("q_proj", "v_proj"), base_quantization="nf4"))
    with rejects("actor.lora.base_quantization", "nf4", 128, "up_proj", "int8", error=ConfigError):
        check(tmp_path, QWEN, LoraConfig(rank=4, targets=("up_proj",), base_quantization="nf4"))


def test_adapter_on_missing_layer_is_rejected(tmp_path: Path) -> None:
    with rejects("actor.lora.targets", "query", "qwen2", error=ConfigError):
        check(tmp_path, QWEN, LoraConfig(rank=4, targets=("q_proj", "query")))


@pytest.mark.parametrize(
    ("lora", "sizes"),
    [
        (None, {"tp": 2}),
        (None, {"sp": 6}),
        (LoraConfig(rank=4, targets=("q_proj", "mlp.down_proj")), {}),
        (LoraConfig(rank=4), {"tp": 2}),
    ],
)
def test_fitting_sizes_and_adapters_are_accepted(tmp_path: Path, lora: LoraConfig | None, sizes: dict) -> None:
    check(tmp_path, QWEN, lora, **sizes)


def check_experts(folder: Path, config: PreTrainedConfig, num_ranks: int, **engine: object) -> None:
    config.save_pretrained(folder)
    settings = {"strategy": "fsdp", "expert_parallel": True, **engine}
    actor = ActorConfig(
        model=ModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-4), engine=EngineConfig.model_validate(settings)
    )
    placement = Placement(device="cpu", pools={"main": [num_ranks]}, roles={"actor": "main"})
    plan_run(ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor))


@pytest.mark.parametrize(("num_ranks", "engine"), [(4, {}), (12, {"shard_ranks": 4}), (1, {})])
def test_ranks_that_divide_the_experts_are_accepted(num_ranks: int, engine: dict, tmp_path: Path) -> None:
    check_experts(tmp_path, tiny.qwen3_moe().config, num_ranks, **engine)


def test_experts_that_ranks_cannot_divide_are_rejected(tmp_path: Path) -> None:
    with rejects("actor.engine.expert_parallel", 4, 6, "actor.engine.shard_ranks", error=ConfigError):
        check_experts(tmp_path, tiny.qwen3_moe().config, 6)


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    with rejects("actor.engine.expert_parallel", "mixtral", error=ConfigError):
        check_experts(tmp_path, QWEN, 2)


def test_replicated_models_do_not_divide_experts(tmp_path: Path) -> None:
    with rejects("actor.engine.expert_parallel", "fsdp", error=ConfigError):
        check_experts(tmp_path, tiny.qwen3_moe().config, 2, strategy="auto")


def test_missing_model_is_not_checked(tmp_path: Path) -> None:
    actor = ActorConfig(model=ModelConfig(path=tmp_path / "no"), optimizer=OptimizerConfig(lr=1e-4))
    placement = Placement(device="cpu", pools={"main": [4]}, roles={"actor": Role(pool="main", tp=4)})
    plan_run(ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=77),
        Qwen2Config(max_position_embeddings=77),
        LlavaConfig(text_config=Qwen2Config(max_position_embeddings=77)),
    ],
)
def test_maximum_positions_are_read_from_the_configuration(tmp_path: Path, config: PreTrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    assert read_max_positions(tmp_path) == 77


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"text_config": null}'])
def test_unknown_maximum_positions_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert read_max_positions(tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "num_ids"),
    [
        ({"model": {"vocab": {"a": 0, "b": 6}}}, (7, 7)),
        ({"model": {"vocab": {"a": 0, "b": 1, "<end>": 6}}, "added_tokens": [{"id": 6}]}, (2, 7)),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 2}]}, (2, 3)),
        ({"model": {}}, None),
        ([], None),
    ],
)
def test_token_ids_are_counted_from_the_tokenizer_file(
    tmp_path: Path, settings: object, num_ids: tuple[int, int] | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert read_num_token_ids(tmp_path) == num_ids


def test_a_missing_tokenizer_file_has_no_number_of_token_ids(tmp_path: Path) -> None:
    assert read_num_token_ids(tmp_path) is None
