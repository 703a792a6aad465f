"""Builds optimizers, included ones or those of a user's function, and the groups of weights that they receive."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from flowrl.config import ConfigError, OptimizerConfig, UserError, WeightGroupConfig, import_function
from flowrl.config.user_errors import convert_errors, describe_exception
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh
from flowrl.engines.parallel.sharding import layers
from flowrl.engines.train.muon import Muon

ParameterGroup = dict[str, Any]
"""Weights (`params`) with their peak `lr` and their `weight_decay`, as torch's optimizers receive them."""

OptimizerBuilder = Callable[[Sequence[ParameterGroup], OptimizerConfig], Optimizer]
"""Type of a user's function that returns an optimizer for groups of weights. Before each step, the engine sets the `lr`
of each group to the group's initial `lr` times the factor of the schedule."""


@dataclass(frozen=True)
class TrainedWeight:
    """A trained weight of a model, and the facts that determine its group."""

    name: str
    parameter: nn.Parameter
    is_embedding: bool
    """Whether the weight is an input embedding, possibly shared with the head."""
    is_hidden_matrix: bool
    """Whether the weight is a matrix of a decoder layer. Other weights are embeddings, heads, norms, biases and fused
    experts.
    """

    def decays(self, config: OptimizerConfig) -> bool:
        """Returns whether weight decay applies to the weight if its group does not set `weight_decay`."""
        if self.is_embedding:
            return "embeddings" not in config.no_decay
        if self.parameter.ndim >= 2:
            return True
        return ("biases" if self.name.endswith("bias") else "norms") not in config.no_decay


def trained_weights(model: nn.Module) -> list[TrainedWeight]:
    """Returns the trained weights of a model. Names of a policy's weights lack the prefix `language_model.`."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden = {id(weight) for layer in layers(model) for weight in layer.parameters() if weight.ndim == 2}
    return [
        TrainedWeight(
            name.removeprefix("language_model."), parameter, id(parameter) in embeddings, id(parameter) in hidden
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def check_groups(weights: Sequence[TrainedWeight], config: OptimizerConfig, key: str = "optimizer") -> None:
    """Raises ConfigError if a pattern of `optimizer.groups` matches no trained weight, or if earlier groups match all
    weights of a group. `key` is the key of the settings, for messages.
    """
    for group, settings in config.groups.items():
        for pattern in settings.weights:
            if not any(fnmatchcase(weight.name, pattern) for weight in weights):
                raise ConfigError(
                    f"{key}.groups.{group}.weights has {pattern!r}, which matches no trained weight; the names are "
                    f"{', '.join(_name_patterns(weights))}: correct it"
                )
    names = {id(settings): group for group, settings in config.groups.items()}
    used = {names[id(own)] for weight in weights if (own := next(_matching_groups(weight, config), None)) is not None}
    if unused := [group for group in config.groups if group not in used]:
        raise ConfigError(
            f"{key}.groups.{unused[0]} has no weight, because earlier groups match all of its weights: put it before "
            f"them, or remove it"
        )


def _name_patterns(weights: Sequence[TrainedWeight]) -> list[str]:
    """Returns the names of weights, with `*` instead of the numbers of layers."""
    patterns = (".".join("*" if part.isdecimal() else part for part in weight.name.split(".")) for weight in weights)
    return list(dict.fromkeys(patterns))


def build_optimizer(
    weights: Sequence[TrainedWeight], config: OptimizerConfig, mesh: RankMesh = SINGLE_PROCESS
) -> Optimizer:
    """Returns an optimizer of the kind `config.kind`. `mesh` has the ranks over which the weights are sharded.

    By default, weight decay applies to matrices only. On biases and norm scales, it would pull outputs towards 0.
    Raises UserError if a user's function raises an error, or does not return an optimizer of these weights.
    """
    if (build := BUILDERS.get(config.kind)) is not None:
        return build(weights, config, mesh)
    groups, owner = _make_groups(weights, config), f"optimizer.kind {config.kind}"
    build_own: OptimizerBuilder = import_function(config.kind)
    with convert_errors(lambda error: UserError(describe_exception(error, owner))):
        optimizer = build_own(groups, config)
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{owner} returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer")
    given, own = ({id(p) for group in each for p in group["params"]} for each in (groups, optimizer.param_groups))
    if given != own:
        raise UserError(
            f"{owner} returned an optimizer of other weights ({len(given - own)} of the {len(given)} weights of the "
            f"model are missing): build it from the groups that the function receives"
        )
    return optimizer


def _make_groups(
    weights: Sequence[TrainedWeight],
    config: OptimizerConfig,
    settings_of: Callable[[TrainedWeight], Mapping[str, object]] = lambda weight: {},
) -> list[ParameterGroup]:
    """Groups weights by their settings. `settings_of` returns further settings of a weight's group, such as Muon's
    momentum.
    """
    groups: list[ParameterGroup] = []
    keys: list[object] = []
    for weight in weights:
        own = next(_matching_groups(weight, config), None)
        settings: ParameterGroup = {
            "lr": config.lr if own is None or own.lr is None else own.lr,
            "weight_decay": config.weight_decay if weight.decays(config) else 0.0,
            **settings_of(weight),
        }
        if own is not None and own.weight_decay is not None:
            settings["weight_decay"] = own.weight_decay
        # A fused update requires parameters of one device mesh.
        key = settings, weight.parameter.device_mesh if isinstance(weight.parameter, DTensor) else None
        if key not in keys:
            keys.append(key)
            groups.append({"params": [], **settings})
        groups[keys.index(key)]["params"].append(weight.parameter)
    return groups


def _matching_groups(weight: TrainedWeight, config: OptimizerConfig) -> Iterator[WeightGroupConfig]:
    for settings in config.groups.values():
        if any(fnmatchcase(weight.name, pattern) for pattern in settings.weights):
            yield settings


def _build_adamw(weights: Sequence[TrainedWeight], config: OptimizerConfig, mesh: RankMesh) -> Optimizer:
    return AdamW(_make_groups(weights, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _build_adamw_8bit(weights: Sequence[TrainedWeight], config: OptimizerConfig, mesh: RankMesh) -> Optimizer:
    from flowrl.engines.train.quantized_adamw import QuantizedAdamW  # noqa: PLC0415 (torchao is optional)

    return QuantizedAdamW(_make_groups(weights, config), lr=config.lr, betas=config.betas, eps=config.eps)


def _build_muon(weights: Sequence[TrainedWeight], config: OptimizerConfig, mesh: RankMesh) -> Optimizer:
    """Raises UserError if the model has no matrix that Muon trains."""
    if weights and not any(weight.is_hidden_matrix for weight in weights):
        raise UserError(
            "optimizer.kind is muon, which trains the matrices of the decoder layers of a transformers model, but the "
            "model has none: set optimizer.kind: adamw"
        )
    groups = _make_groups(
        weights, config, lambda weight: {"momentum": config.momentum if weight.is_hidden_matrix else None}
    )
    return Muon(groups, mesh, lr=config.lr, betas=config.betas, eps=config.eps)


BUILDERS: Mapping[str, Callable[[Sequence[TrainedWeight], OptimizerConfig, RankMesh], Optimizer]] = {
    "adamw": _build_adamw,
    "adamw_8bit": _build_adamw_8bit,
    "muon": _build_muon,
}
"""Name -> function that builds an included optimizer. `flowrl.config.model.OPTIMIZERS` has the names."""
