"""The parameter counts equal those of the models, and constants those of the implementation."""

from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedConfig

from flowrl.algorithms import hidden_logprobs, logprobs
from flowrl.config.source import read_json
from flowrl.engines.rollout import sampling
from flowrl.engines.rollout.hf import decoder, kv_cache
from flowrl.engines.train import module_engine
from flowrl.engines.train.fsdp import outputs
from flowrl.memory.head_memory import CHUNK_ELEMENTS, TILE_SIDES, TILED_FROM
from flowrl.memory.model_size import PUBLISHED, ModelSize, model_size_from_config
from flowrl.memory.role_memory import QUANTIZATION_BLOCK
from flowrl.memory.rollout_memory import MIN_ROWS, PREFILL_TOKENS, SAMPLED_ELEMENTS, SLOT_MULTIPLE
from tests.engines.families import FAMILIES, build
from tests.engines.tiny import qwen3_moe


def size_of(config: PreTrainedConfig) -> ModelSize:
    size = model_size_from_config(config.to_dict())
    assert size is not None
    return size


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "DeepSeek-V3"])
def test_parameter_count_equals_the_model(name: str) -> None:
    model = build(name)
    size = size_of(model.config)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    head = 0 if size.tied else size.embedding
    assert size.layers * size.layer - size.dense_surplus + size.backbone_non_layer == size.parameters - head
    experts = [weight.numel() for weight in model.parameters() if weight.ndim == 3]
    assert size.experts == sum(experts[:2]) and size.largest_weight >= max(experts, default=0)


def test_the_parameters_of_a_mixture_with_a_dense_layer_are_counted() -> None:
    model = qwen3_moe(mlp_only_layers=[0])
    assert size_of(model.config).parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("family", ["mamba", "deepseek_v3"])
def test_unknown_family_has_no_size(family: str) -> None:
    assert model_size_from_config({"model_type": family}) is None


def test_head_constants_equal_the_implementation() -> None:
    assert outputs._TILED_FROM == TILED_FROM
    assert logprobs._CHUNK_ELEMENTS == CHUNK_ELEMENTS
    assert hidden_logprobs._TILE_SIDES["cpu"] == TILE_SIDES["cpu"]
    assert TILE_SIDES["cuda"] == hidden_logprobs._OTHER_TILE_SIDES


def test_rollout_constants_equal_the_implementation() -> None:
    assert SLOT_MULTIPLE == kv_cache.SLOT_MULTIPLE
    assert QUANTIZATION_BLOCK == module_engine.BLOCK
    assert decoder._MIN_ROWS == MIN_ROWS
    assert decoder._PREFILL_TOKENS == PREFILL_TOKENS
    assert sampling._CHUNK_ELEMENTS == SAMPLED_ELEMENTS


def test_the_models_that_recipes_name_have_published_sizes() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    settings = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in recipes.glob("*/*.yaml")]
    roles = [role for values in settings for role in values.values() if isinstance(role, dict) and "model" in role]
    names = {role["model"]["path"] for role in roles if not role["model"]["path"].startswith("runs/")}
    assert names and names <= read_json(PUBLISHED).keys()


@pytest.mark.parametrize(
    ("model", "billions"), [("Qwen/Qwen2.5-0.5B", 0.494), ("Qwen/Qwen2.5-1.5B", 1.544), ("Qwen/Qwen2.5-7B", 7.616)]
)
def test_published_sizes_have_the_published_number_of_parameters(model: str, billions: float) -> None:
    """The technical report of Qwen2.5 (arXiv 2412.15115) and the model cards: 0.49, 1.54 and 7.61 billion."""
    size = model_size_from_config(read_json(PUBLISHED)[model])
    assert size is not None and size.parameters / 1e9 == pytest.approx(billions, abs=5e-4)
