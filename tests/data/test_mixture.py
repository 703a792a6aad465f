"""The sizes of experts in a model's configuration are those of the weights that transformers creates."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.data.mixture import ROUTER_SCORES, read_mixture
from flowrl.engines.models.routing import find_routers
from tests.engines.families import FAMILIES

CONFIGS = {name: family.config for name, family in FAMILIES.items() if family.config().model_type in ROUTER_SCORES}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_model(name: str) -> None:
    config = CONFIGS[name]()
    mixture = read_mixture(json.loads(config.to_json_string(use_diff=False)))
    assert mixture is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = [tuple(weight.shape) for key, weight in model.named_parameters() if key.endswith("experts.down_proj")]
    assert shapes == [(mixture.num_experts, 32, mixture.expert_width)] * sum(mixture.has_experts)
    assert len(find_routers(model)) == sum(mixture.has_experts)
    shared = [weight.shape[1] for key, weight in model.named_parameters() if "shared_expert" in key and "down" in key]
    assert shared == [mixture.shared_width] * sum(mixture.has_experts) * (mixture.shared_width > 0)
    assert mixture.per_token == config.num_experts_per_tok
    assert mixture.router_loss_coef == getattr(config, "router_aux_loss_coef", None)


def test_every_family_is_covered() -> None:
    assert {make().model_type for make in CONFIGS.values()} == set(ROUTER_SCORES)


@pytest.mark.parametrize("settings", [{}, {"model_type": "qwen3"}, {"model_type": "olmoe", "num_experts": 8}])
def test_other_models_have_no_sizes(settings: dict[str, object]) -> None:
    assert read_mixture(settings) is None
