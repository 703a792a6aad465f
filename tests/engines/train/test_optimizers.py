"""Optimizers: the included ones, and functions of the user."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrl.config import ActorConfig, ConfigError, OptimizerConfig, UserError
from flowrl.config.model import OPTIMIZERS
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.train.fsdp.outputs import PolicyModel
from flowrl.engines.train.optimizers import (
    BUILDERS,
    ParameterGroup,
    TrainedWeight,
    build_optimizer,
    check_groups,
    trained_weights,
)
from tests.engines.tiny import qwen2
from tests.errors import rejects

OWN = "tests.engines.train.test_optimizers"


def build_sgd(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=float(config.options["momentum"] or 0))


def build_nothing(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> None:
    return None


def build_for_another_weight(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([groups[0]["params"][0], nn.Parameter(torch.ones(1))], lr=config.lr)


def build_without_settings(groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups)


def weights() -> list[TrainedWeight]:
    layer = nn.Linear(3, 2)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    return trained_weights(layer)


def test_every_named_optimizer_has_a_builder() -> None:
    assert set(BUILDERS) == set(OPTIMIZERS)


def test_weight_decay_applies_to_matrices() -> None:
    optimizer = build_optimizer(weights(), OptimizerConfig(lr=0.1, weight_decay=0.5))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [(group["params"][0].ndim, group["weight_decay"]) for group in optimizer.param_groups] == [(2, 0.5), (1, 0)]


def settings_by_name(model: nn.Module, **settings: Any) -> dict[str, dict[str, Any]]:
    """Returns the settings of the group of each weight of a model."""
    trained = trained_weights(model)
    optimizer = build_optimizer(trained, OptimizerConfig.model_validate({"lr": 0.1, "weight_decay": 0.5} | settings))
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    return {weight.name: groups[id(weight.parameter)] for weight in trained}


NAMES = {
    "norm": "model.layers.1.input_layernorm.weight",
    "bias": "model.layers.0.self_attn.q_proj.bias",
    "embedding": "model.embed_tokens.weight",
    "matrix": "model.layers.0.self_attn.q_proj.weight",
}


@pytest.mark.parametrize(
    ("no_decay", "decaying"),
    [
        (["norms", "biases"], {"embedding", "matrix"}),
        (["norms", "biases", "embeddings"], {"matrix"}),
        (["biases"], {"norm", "embedding", "matrix"}),
        ([], set(NAMES)),
    ],
)
def test_a_setting_excludes_kinds_of_weights_from_decay(no_decay: list[str], decaying: set[str]) -> None:
    groups = settings_by_name(PolicyModel(qwen2()), no_decay=no_decay)
    assert {kind for kind, name in NAMES.items() if groups[name]["weight_decay"]} == decaying


def test_the_first_matching_group_sets_the_rate_and_decay() -> None:
    first = {"weights": ["*.q_proj.*"], "lr": 0.3}
    second = {"weights": ["model.layers.0.*", "model.embed_tokens.weight"], "weight_decay": 0.2}
    groups = settings_by_name(PolicyModel(qwen2()), groups={"first": first, "second": second})
    settings = {kind: (groups[name]["lr"], groups[name]["weight_decay"]) for kind, name in NAMES.items()}
    assert settings == {"norm": (0.1, 0.0), "bias": (0.3, 0.0), "embedding": (0.1, 0.2), "matrix": (0.3, 0.5)}


def test_a_pattern_without_a_match_is_rejected_with_the_names() -> None:
    own = {"groups": {"own": {"weights": ["model.embed_tokens.*", "value_head.*"], "lr": 0.3}}}
    config = OptimizerConfig.model_validate({"lr": 0.1} | own)
    facts = (
        "actor.optimizer.groups.own.weights",
        "value_head",
        "model.embed_tokens.weight",
        ".self_attn.q_proj.weight",
    )
    with rejects(*facts, error=ConfigError):
        check_groups(trained_weights(PolicyModel(qwen2())), config, "actor.optimizer")


def test_a_group_without_a_weight_of_its_own_is_rejected() -> None:
    groups = {"all": {"weights": ["*"], "lr": 0.3}, "norms": {"weights": ["*norm.weight"], "lr": 0.1}}
    weights = trained_weights(PolicyModel(qwen2()))
    config = OptimizerConfig.model_validate({"lr": 0.1, "groups": groups})
    with rejects("actor.optimizer.groups.norms", "earlier", error=ConfigError):
        check_groups(weights, config, "actor.optimizer")
    check_groups(weights, OptimizerConfig.model_validate({"lr": 0.1, "groups": dict(reversed(groups.items()))}))


def test_muon_trains_the_matrices_of_layers() -> None:
    groups = settings_by_name(CriticModel(qwen2().model), kind="muon")
    expected = {name for name in groups if ".layers." in name and name.endswith("proj.weight")}
    assert len(expected) == 14
    assert {name for name, group in groups.items() if group["momentum"] is not None} == expected


def test_muon_rejects_a_model_without_layers() -> None:
    with rejects("muon", "adamw", error=UserError):
        build_optimizer(weights(), OptimizerConfig(lr=0.1, kind="muon"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"optimizer": {"kind": "muon"}, "lora": {"rank": 4}}, ("muon", "lora")),
        ({"optimizer": {"kind": "adamw_8bit"}, "model": {"dtype": "float64"}}, ("adamw_8bit", "float64")),
        ({"optimizer": {"kind": "adamw_8bit"}, "engine": {"offload": "parameters"}}, ("adamw_8bit", "parameters")),
        ({"optimizer": {"momentum": 0.9}}, ("momentum", "muon")),
        ({"optimizer": {"groups": {"a/b": {"weights": ["x"], "lr": 1.0}}}}, ("groups", "a/b")),
        ({"optimizer": {"groups": {"a": {"weights": ["x"]}}}}, ("optimizer.groups.a", "lr", "weight_decay")),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings: dict[str, Any], facts: tuple[str, ...]) -> None:
    base: dict[str, Any] = {"model": {"path": Path("m")}, "optimizer": {"lr": 0.1}}
    merged = {key: base.get(key, {}) | settings.get(key, {}) for key in base | settings}
    with rejects(*facts, error=ValueError):
        ActorConfig.model_validate(merged)


def test_a_users_function_builds_the_optimizer() -> None:
    """Two steps with gradient 1 and momentum 0.5: 1 - 0.1 - 0.1 * 1.5."""
    config = OptimizerConfig(lr=0.1, kind=f"{OWN}:build_sgd", options={"momentum": 0.5})
    trained = weights()
    optimizer = build_optimizer(trained, config)
    parameters = [weight.parameter for weight in trained]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(weight.flatten().tolist() == pytest.approx([0.75] * weight.numel()) for weight in parameters)


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("build_nothing", ("NoneType", "torch.optim.Optimizer")),
        ("build_without_settings", ("TypeError",)),
        ("build_sgd", ("KeyError", __file__)),
        ("build_for_another_weight", (1, 2)),
    ],
)
def test_a_function_that_builds_no_optimizer_of_the_weights_is_rejected(
    function: str, facts: tuple[object, ...]
) -> None:
    with rejects("optimizer.kind", OWN, *facts):
        build_optimizer(weights(), OptimizerConfig(lr=0.1, kind=f"{OWN}:{function}"))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"kind": "adam"}, ("adam", "adamw")),
        ({"options": {"momentum": 0.5}}, ("momentum", "adamw", "kind")),
    ],
)
def test_an_unknown_optimizer_or_option_is_rejected(settings: dict, facts: tuple[str, ...]) -> None:
    with rejects(*facts, error=ValueError):
        OptimizerConfig.model_validate({"lr": 0.1} | settings)
