"""Tensor-parallel plans of families without one in transformers. tests/engines/models/test_families.py trains them."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flowrl.engines.parallel.sharding import layers
from flowrl.engines.parallel.tp_plans import PLANS, divide_heads, find_plan
from tests.engines.families import TRAINED, build

NAMES = [name for name, family in TRAINED.items() if family.config().model_type in PLANS]


def test_each_plan_has_a_family() -> None:
    assert {TRAINED[name].config().model_type for name in NAMES} == PLANS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_divides_every_matrix_of_the_layers(name: str) -> None:
    model = build(name)
    plan = find_plan(model)
    assert plan is not None
    inner = {id(module) for layer in layers(model) for module in layer.modules()}
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    matrices = {path for path, module in linear.items() if id(module) in inner}
    number = next(part for part in next(iter(matrices)).split(".") if part.isdigit())
    first = {path for path in matrices if number in path.split(".")}
    assert {pattern.replace("*", number) for pattern in plan.styles} == first


class Attention(nn.Module):
    """Records its arguments."""

    num_heads, num_kv_heads = 4, 2

    def forward(self, states: Tensor, alibi: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return states, alibi


def test_a_rank_gets_the_biases_of_its_heads() -> None:
    bias = torch.arange(2 * 4 * 3.0).view(2 * 4, 1, 3)  # 2 rows with 4 heads each
    for rank in range(2):
        module = Attention()
        divide_heads(module, PLANS["bloom"], 4, rank, 2)
        _, own = module(torch.zeros(1), alibi=bias)
        assert module.num_heads == 2
        assert torch.equal(own, torch.cat([bias[2 * rank : 2 * rank + 2], bias[4 + 2 * rank : 6 + 2 * rank]]))
        assert module(torch.zeros(1))[1] is None


def test_a_mask_of_all_heads_is_not_divided() -> None:
    module, mask = Attention(), torch.zeros(2, 1, 3, 3)
    divide_heads(module, PLANS["falcon"], 4, 1, 2)
    assert module(torch.zeros(1), alibi=mask)[1] is mask
    per_head = torch.arange(2 * 4 * 9.0).view(2, 4, 3, 3)
    assert torch.equal(module(torch.zeros(1), alibi=per_head)[1], per_head[:, 2:])
