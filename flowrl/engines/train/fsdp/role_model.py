"""The model of a role, with its head and its adapter, and the function that computes its outputs."""

import torch
from torch import nn
from transformers import PreTrainedModel

from flowrl.config import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    RewardModelConfig,
    ScoringModelConfig,
    TrainedConfig,
)
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.adapters.saved_adapter import SavedAdapter
from flowrl.engines.models.loading import (
    CriticModel,
    RewardModel,
    TrainedModel,
    load_critic,
    load_policy,
    load_reward_model,
)
from flowrl.engines.train.base import ModelKind, TrainContext
from flowrl.engines.train.fsdp.outputs import Compute, PolicyModel, policy_outputs, score_outputs, value_outputs
from flowrl.engines.train.optimizers import check_groups, trained_weights


def load_model(context: TrainContext, *, on_meta: bool) -> tuple[nn.Module, Compute]:
    """Loads the model of a role and its adapter. Returns the model and the function that computes the outputs."""
    config, lora = context.config, context.config.lora if isinstance(context.config, TrainedConfig) else None
    if context.kind == "policy":
        language_model = load_policy(context.model, on_meta=on_meta, merges=lora is None)
        _add_adapter(language_model, context.model, lora)
        return PolicyModel(language_model), policy_outputs
    if context.kind == "critic":
        assert isinstance(config, CriticConfig)
        critic = load_critic(
            context.model, head=config.head, seed=config.head_seed, on_meta=on_meta, merges=lora is None
        )
        model, body, head, compute = critic, critic.backbone, critic.value_head, value_outputs
    else:
        assert isinstance(config, RewardModelConfig | ScoringModelConfig)
        scorer = load_reward_model(
            context.model, head=config.head, seed=config.head_seed, on_meta=on_meta, merges=lora is None
        )
        model, body, head, compute = scorer, scorer.language_model, scorer.head, score_outputs
    if lora is not None:
        _add_adapter(body, context.model, lora)
        head.to(torch.promote_types(head.weight.dtype, torch.float32))
    return model, compute


def _add_adapter(model: PreTrainedModel, config: ModelConfig, lora: LoraConfig | None) -> None:
    """Adds an adapter to a model if `lora` is set, with new weights or the weights of `config.adapter`."""
    if lora is None:
        return
    add_adapter(model, lora)
    if config.adapter is not None:
        SavedAdapter.read(config.adapter).continue_in(model)


def saved_model(model: nn.Module) -> TrainedModel:
    """Returns the model with the weight names of an export. For a policy, this is the inner language model."""
    if isinstance(model, PolicyModel):
        return model.language_model
    assert isinstance(model, CriticModel | RewardModel), "the model of a role"
    return model


def check_trained_weights(kind: ModelKind, config: TrainedConfig, key: str) -> None:
    """Raises the errors of `check_groups`, without reading the weights of the model. Raises LoraError if the adapter
    does not match the model, or if it does not match the saved adapter whose training it continues.

    `key`: key of the optimizer settings, for messages.
    """
    model, _ = load_model(TrainContext(kind, config, torch.device("cpu"), None), on_meta=True)
    check_groups(trained_weights(model), config.optimizer, key)
