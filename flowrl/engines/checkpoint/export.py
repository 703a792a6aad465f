"""Exports a policy, its adapter, a critic or a reward model from a checkpoint that any number of ranks wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flowrl.config import LoraConfig, ModelConfig
from flowrl.config.source import read_json
from flowrl.data.checksums import CheckpointError
from flowrl.data.dtypes import torch_dtype
from flowrl.engines.checkpoint.shards import INDEX, read_index, read_into
from flowrl.engines.models.loading import (
    CriticModel,
    RewardModel,
    TrainedModel,
    build_critic,
    build_policy,
    build_reward_model,
    describe_tokenizer,
    load_critic,
    load_policy,
    load_reward_model,
    save_model,
)
from flowrl.engines.models.lora import add_adapter, save_adapter
from flowrl.engines.train.base import ModelKind
from flowrl.engines.train.module_state import MODEL

DESCRIPTION = "model"
"""Subfolder of a role's checkpoint that contains the model configuration and the tokenizer."""

_ADAPTER = "adapter.json"
"""File in the `DESCRIPTION` folder of a LoRA run. It contains the adapter's settings and the path of the base model."""

_CONFIG = f"{DESCRIPTION}/config.json"

_POLICY = MODEL + "language_model."
"""Prefix of the policy's weights in an actor's checkpoint."""

_REWARD_MODEL = MODEL + "model."
"""Prefix of all weights in a reward model's checkpoint."""

_VALUE_HEAD = MODEL + "value_head."
"""Prefix of the weights of the value head in a critic's checkpoint."""

_CRITIC = (MODEL + "backbone.", _VALUE_HEAD)
"""Prefixes of all weights in a critic's checkpoint."""

_MODELS = (_POLICY, _REWARD_MODEL, *_CRITIC)
"""Prefixes of the weights in the checkpoints of all roles with a trained model."""


def describe_export(files: Mapping[str, bytes], config: ModelConfig, lora: LoraConfig | None) -> dict[str, bytes]:
    """Returns {file name: contents} for the files that an export needs besides the weights in a checkpoint.

    Args:
        files: files of the model's folder, from `TrainEngine.describe_model`.
        config: settings with which the model was loaded.
        lora: settings of the adapter. None: the model has no adapter.
    """
    files = dict(files) | describe_tokenizer(config.tokenizer_path)
    if lora is not None:
        files |= describe_adapter(config, lora)
    return {f"{DESCRIPTION}/{name}": data for name, data in files.items()}


def describe_adapter(model: ModelConfig, lora: LoraConfig) -> dict[str, bytes]:
    """Returns {file name: contents} for the file that describes an adapter in a checkpoint."""
    path = model.path.resolve() if model.path.exists() else model.path
    settings = {"model": model.model_dump(mode="json") | {"path": str(path)}, "lora": lora.model_dump(mode="json")}
    return {_ADAPTER: json.dumps(settings).encode()}


def save_weights(
    kind: ModelKind,
    files: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    tokenizer_path: Path,
    folder: Path,
) -> None:
    """Saves a model with its tokenizer to a folder that transformers can load. The folder is created atomically.

    Args:
        kind: kind of the model.
        files: files of the model's folder except the weights, from `TrainEngine.describe_model`.
        weights: full weights by name, from `TrainEngine.export_weights`.
        tokenizer_path: folder of the tokenizer.
        folder: a new folder.
    Raises ModelError if the folder exists, and UserError if it cannot be written.
    """
    with TemporaryDirectory() as name:
        description = Path(name)
        for file, contents in files.items():
            (description / file).write_bytes(contents)
        if kind == "critic":
            model = build_critic(description, weights)
        elif kind == "reward_model":
            model = build_reward_model(description, _without_prefix(weights, "model."))
        else:
            model = build_policy(description, weights)
    save_model(model, tokenizer_path, folder)


def roles_with_model(checkpoint: Path) -> list[str]:
    """Returns the roles in the checkpoint of a run whose model can be exported."""
    return sorted(path.name for path in checkpoint.iterdir() if (path / _CONFIG).is_file())


def export_model(checkpoint: Path, output: Path) -> None:
    """Exports the model of a role to a folder that transformers can load. Merges an adapter into the weights.

    A policy becomes a causal language model, and a reward model a sequence classifier. A critic becomes its backbone,
    with its value head in `value_head.safetensors`.

    Args:
        checkpoint: folder written by `save_checkpoint` of a worker with a trained model.
        output: a new folder, which is created atomically.
    Raises:
        CheckpointError: the checkpoint has no model, or does not match the base model.
        ModelError: `output` exists, or the base model cannot be loaded.
        UserError: `output` cannot be written.
    """
    description, weights = _description_folder(checkpoint), _read_weights(checkpoint)
    if adapter_base(checkpoint) is not None:
        model = _load_adapted(description, weights)
    elif _is_critic(weights):
        model = build_critic(description, _without_prefix(weights, MODEL))
    elif _is_reward_model(weights):
        model = build_reward_model(description, _without_prefix(weights, _REWARD_MODEL))
    else:
        model = build_policy(description, _without_prefix(weights, _POLICY))
    save_model(model, description, output)


def export_adapter(checkpoint: Path, output: Path) -> None:
    """Exports the adapter of an actor's checkpoint to a folder that peft loads onto the base model.

    The arguments and errors are those of `export_model`. Also raises CheckpointError if the checkpoint has no adapter
    of a policy, and LoraError if `output` exists.
    """
    description, base = _description_folder(checkpoint), adapter_base(checkpoint)
    if base is None:
        raise CheckpointError(
            f"{checkpoint} has no adapter, because its run trained all weights (lora was not set): export without "
            f"--adapter"
        )
    model = _load_adapted(description, _read_weights(checkpoint))
    if isinstance(model, CriticModel | RewardModel):
        kind = "critic" if isinstance(model, CriticModel) else "reward model"
        raise CheckpointError(
            f"{checkpoint} has the adapter of a {kind}, which needs its trained head: export without --adapter"
        )
    save_adapter(model, base, output)


def adapter_base(checkpoint: Path) -> Path | None:
    """Returns the path of the base model. Returns None if the checkpoint has no adapter."""
    file = checkpoint / DESCRIPTION / _ADAPTER
    return ModelConfig.model_validate(read_json(file)["model"]).path if file.is_file() else None


def _description_folder(checkpoint: Path) -> Path:
    if (checkpoint / _CONFIG).is_file():
        return checkpoint / DESCRIPTION
    if (checkpoint / INDEX).is_file() and any(name.startswith(_MODELS) for name in read_index(checkpoint).tensors):
        raise CheckpointError(
            f"{checkpoint} was saved by an earlier version of flowrl, without the description of its model that an "
            f"export needs: resume the run, and export a checkpoint that this version saves"
        )
    raise CheckpointError(
        f"{checkpoint} has no model that can be exported: choose an actor, a critic or a reward model"
    )


def _read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the weights of the model in a checkpoint, by their names in it."""
    index = read_index(checkpoint)
    weights: dict[str, Any] = {
        name: torch.empty(stored["size"], dtype=torch_dtype(stored["dtype"]))
        for name, stored in index.tensors.items()
        if name.startswith(_MODELS)
    }
    read_into(weights, checkpoint, index, None)
    return weights


def _is_reward_model(weights: Mapping[str, Tensor]) -> bool:
    return any(name.startswith(_REWARD_MODEL) for name in weights)


def _is_critic(weights: Mapping[str, Tensor]) -> bool:
    return any(name.startswith(_VALUE_HEAD) for name in weights)


def _without_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def _load_adapted(description: Path, weights: Mapping[str, Tensor]) -> TrainedModel:
    """Loads the base model, and adds the trained weights of a checkpoint: the adapter, and the head of a critic or a
    reward model.
    """
    settings = read_json(description / _ADAPTER)
    base, lora = ModelConfig.model_validate(settings["model"]), LoraConfig.model_validate(settings["lora"])
    if _is_critic(weights):
        model = load_critic(base)
        add_adapter(model.backbone, lora)
        weights = _without_prefix(weights, MODEL)
    elif _is_reward_model(weights):
        model = load_reward_model(base, head="fresh")  # the checkpoint has the head
        add_adapter(model.language_model, lora)
        weights = _without_prefix(weights, MODEL)
    else:
        model = load_policy(base)
        add_adapter(model, lora)
        weights = _without_prefix(weights, _POLICY)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if {name: weight.shape for name, weight in trained.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(
            f"the adapter in {description.parent} does not match the model in {settings['model']['path']}: restore the "
            f"model that the run started with"
        )
    model.load_state_dict(weights, strict=False, assign=True)  # a trained head may have another dtype
    return model
