"""A policy, or its adapter alone, out of a checkpoint: a folder for others to load, from any number of ranks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import LoraConfig, ModelConfig
from flowrl.data.checksums import CheckpointError
from flowrl.engines.checkpoint.engine_checkpoint import MODEL
from flowrl.engines.checkpoint.shards import dtype_of, read_index, read_into
from flowrl.engines.models.loading import load_policy, model_of, save_model
from flowrl.engines.models.lora import add_adapter, save_adapter

DESCRIPTION = "model"
"""Folder in that of the actor: config and tokenizer."""

_ADAPTER = "adapter.json"
"""File in it, where the checkpoint has an adapter alone: what that is, and the model it belongs to."""

_POLICY = MODEL + "language_model."
"""What the weights' names begin with in an actor's checkpoint."""


def describe_adapter(model: ModelConfig, lora: LoraConfig) -> dict[str, bytes]:
    """What `export_policy` must know of an adapter, as a file beside the config."""
    path = model.path.resolve() if model.path.exists() else model.path
    settings = {"model": model.model_dump(mode="json") | {"path": str(path)}, "lora": lora.model_dump(mode="json")}
    return {_ADAPTER: json.dumps(settings).encode()}


def export_policy(checkpoint: Path, output: Path) -> None:
    """Writes the policy of an actor's folder so that transformers loads it. Needs memory for its weights once.

    Args:
        checkpoint: what `Actor.save_checkpoint` wrote.
        output: a folder that does not exist yet; it appears whole or not at all.
    Raises:
        CheckpointError: there is no such policy, or the adapter in it does not fit the model it was trained on.
        ModelError: `output` exists already, or the model that an adapter was trained on is not where it was.
        UserError: it cannot be written.
    """
    described, named = _described(checkpoint), _weights(checkpoint)
    model = model_of(described, named) if adapter_base(checkpoint) is None else _adapted(described, named)
    save_model(model, described, output)


def export_adapter(checkpoint: Path, output: Path) -> None:
    """Writes the adapter of an actor's folder alone, so that peft loads it onto the model that the run began with.

    Args and raises: as `export_policy`; CheckpointError also without an adapter, LoraError where `output` exists.
    """
    described, base = _described(checkpoint), adapter_base(checkpoint)
    if base is None:
        raise CheckpointError(
            f"{checkpoint} has no adapter, because its run trained all weights (lora was not set): export the model, "
            f"without --adapter"
        )
    save_adapter(_adapted(described, _weights(checkpoint)), base, output)


def adapter_base(checkpoint: Path) -> Path | None:
    """Where the model was that an adapter was trained on; None for a policy that was trained as a whole."""
    file = checkpoint / DESCRIPTION / _ADAPTER
    return ModelConfig.model_validate(json.loads(file.read_text())["model"]).path if file.is_file() else None


def _described(checkpoint: Path) -> Path:
    """Where the description of an actor's policy is."""
    described = checkpoint / DESCRIPTION
    if not (described / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} describes no language model: only what an Actor saved is exported")
    return described


def _weights(checkpoint: Path) -> dict[str, Tensor]:
    """What was saved of an actor's policy."""
    index = read_index(checkpoint)
    weights: dict[str, Any] = {
        name: torch.empty(stored["size"], dtype=dtype_of(stored["dtype"]))
        for name, stored in index.tensors.items()
        if name.startswith(_POLICY)
    }
    read_into(weights, checkpoint, index, None)
    return {name.removeprefix(_POLICY): weight for name, weight in weights.items()}


def _adapted(described: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model that an adapter was trained on, with it."""
    settings = json.loads((described / _ADAPTER).read_text())
    model = load_policy(ModelConfig.model_validate(settings["model"]))
    add_adapter(model, LoraConfig.model_validate(settings["lora"]))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if {name: weight.shape for name, weight in trained.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(
            f"the adapter in {described.parent} does not fit the model in {settings['model']['path']}: put the model "
            f"there that the run began with"
        )
    model.load_state_dict(weights, strict=False)
    return model
