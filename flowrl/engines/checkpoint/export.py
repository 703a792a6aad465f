"""Exports a policy or its adapter from a checkpoint that any number of ranks wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import LoraConfig, ModelConfig
from flowrl.data.checksums import CheckpointError
from flowrl.data.dtypes import torch_dtype
from flowrl.engines.checkpoint.engine_checkpoint import MODEL
from flowrl.engines.checkpoint.shards import read_index, read_into
from flowrl.engines.models.loading import build_model, load_policy, save_model
from flowrl.engines.models.lora import add_adapter, save_adapter

DESCRIPTION = "model"
"""Subfolder of an actor's checkpoint that contains the model configuration and the tokenizer."""

_ADAPTER = "adapter.json"
"""File in the `DESCRIPTION` folder of a LoRA run. It contains the adapter's settings and the path of the base model."""

_POLICY = MODEL + "language_model."
"""Prefix of the policy's weights in an actor's checkpoint."""


def describe_adapter(model: ModelConfig, lora: LoraConfig) -> dict[str, bytes]:
    """Returns {file name: contents} for the file that describes an adapter in a checkpoint."""
    path = model.path.resolve() if model.path.exists() else model.path
    settings = {"model": model.model_dump(mode="json") | {"path": str(path)}, "lora": lora.model_dump(mode="json")}
    return {_ADAPTER: json.dumps(settings).encode()}


def export_policy(checkpoint: Path, output: Path) -> None:
    """Exports the policy of an actor's checkpoint to a folder that transformers can load. Merges an adapter into the
    weights.

    Args:
        checkpoint: folder written by `Actor.save_checkpoint`.
        output: a new folder, which is created atomically.
    Raises:
        CheckpointError: the checkpoint has no policy, or does not match the base model.
        ModelError: `output` exists, or the base model cannot be loaded.
        UserError: `output` cannot be written.
    """
    description, weights = _description_folder(checkpoint), _policy_weights(checkpoint)
    is_adapter = adapter_base(checkpoint) is not None
    model = _load_adapted(description, weights) if is_adapter else build_model(description, weights)
    save_model(model, description, output)


def export_adapter(checkpoint: Path, output: Path) -> None:
    """Exports the adapter of an actor's checkpoint to a folder that peft loads onto the base model.

    The arguments and errors are those of `export_policy`. Also raises CheckpointError if the checkpoint has no adapter,
    and LoraError if `output` exists.
    """
    description, base = _description_folder(checkpoint), adapter_base(checkpoint)
    if base is None:
        raise CheckpointError(
            f"{checkpoint} has no adapter, because its run trained all weights (lora was not set): export without "
            f"--adapter"
        )
    save_adapter(_load_adapted(description, _policy_weights(checkpoint)), base, output)


def adapter_base(checkpoint: Path) -> Path | None:
    """Returns the path of the base model. Returns None if the checkpoint has no adapter."""
    file = checkpoint / DESCRIPTION / _ADAPTER
    return ModelConfig.model_validate(json.loads(file.read_text())["model"]).path if file.is_file() else None


def _description_folder(checkpoint: Path) -> Path:
    folder = checkpoint / DESCRIPTION
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} is not the checkpoint of an Actor: only an actor's model can be exported")
    return folder


def _policy_weights(checkpoint: Path) -> dict[str, Tensor]:
    index = read_index(checkpoint)
    weights: dict[str, Any] = {
        name: torch.empty(stored["size"], dtype=torch_dtype(stored["dtype"]))
        for name, stored in index.tensors.items()
        if name.startswith(_POLICY)
    }
    read_into(weights, checkpoint, index, None)
    return {name.removeprefix(_POLICY): weight for name, weight in weights.items()}


def _load_adapted(description: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    settings = json.loads((description / _ADAPTER).read_text())
    model = load_policy(ModelConfig.model_validate(settings["model"]))
    add_adapter(model, LoraConfig.model_validate(settings["lora"]))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if {name: weight.shape for name, weight in trained.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(
            f"the adapter in {description.parent} does not match the model in {settings['model']['path']}: restore the "
            f"model that the run started with"
        )
    model.load_state_dict(weights, strict=False)
    return model
