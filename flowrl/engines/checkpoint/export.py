"""Exports a policy, its adapter, a critic or a reward model from a checkpoint that any number of ranks wrote."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from flowrl.config import ExportConfig, LoraConfig, ModelConfig, ModelKind
from flowrl.config.source import read_json
from flowrl.data.checksums import CheckpointError
from flowrl.data.dtypes import torch_dtype
from flowrl.engines.checkpoint.model_folder import (
    DEFAULT_EXPORT,
    check_is_new,
    describe_tokenizer,
    export_dtype,
    in_file_order,
    write_model,
)
from flowrl.engines.checkpoint.shards import INDEX, Index, read_index, read_tensor
from flowrl.engines.models.adapters.lora import add_adapter, save_adapter
from flowrl.engines.models.loading import ModelError, load_critic, load_policy, load_reward_model
from flowrl.engines.models.parameters import replace_parameter
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weights import cast_dtype, weight_shapes
from flowrl.engines.train.module_engine import MODEL

DESCRIPTION = "model"
"""Subfolder of a role's checkpoint that contains the model configuration and the tokenizer."""

_ADAPTER = "adapter.json"
"""File in the `DESCRIPTION` folder of a LoRA run. It contains the adapter's settings and the path of the base model."""

_CONFIG = f"{DESCRIPTION}/config.json"

_MODEL_FILES = ("config.json", "generation_config.json")
"""Files of `TrainEngine.describe_model` in the `DESCRIPTION` folder, which also has those of the tokenizer."""

_POLICY = MODEL + "language_model."
"""Prefix of the policy's weights in an actor's checkpoint."""

_REWARD_MODEL = MODEL + "model."
"""Prefix of all weights in a reward model's checkpoint."""

_SCORE_BIAS = "model.score.bias"
"""Name in a reward model that started from a critic."""

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
    paths = {"path": model.path, "adapter": model.adapter}
    paths = {name: str(path.resolve() if path.exists() else path) for name, path in paths.items() if path is not None}
    settings = {"model": model.model_dump(mode="json") | paths, "lora": lora.model_dump(mode="json")}
    return {_ADAPTER: json.dumps(settings).encode()}


def roles_with_model(checkpoint: Path) -> list[str]:
    """Returns the sorted names of the roles in a checkpoint that have a model to export."""
    return sorted(path.name for path in checkpoint.iterdir() if (path / _CONFIG).is_file())


def export_model(checkpoint: Path, output: Path, config: ExportConfig = DEFAULT_EXPORT) -> None:
    """Exports the model of a role to a folder that transformers can load. Merges an adapter into the weights.

    A policy becomes a causal language model. A reward model and a critic become sequence classifiers with one label.
    Reads and writes one weight at a time.

    Args:
        checkpoint: folder written by `save_checkpoint` of a worker with a trained model.
        output: a new folder, which is created atomically.
        config: size of the files, and dtype of the weights.
    Raises:
        CheckpointError: the checkpoint has no model, or does not match the base model.
        ModelError: `output` exists, or the base model cannot be loaded.
        UserError: `output` cannot be written.
    """
    check_is_new(output)
    description, index, dtype = _description_folder(checkpoint), read_index(checkpoint), export_dtype(config)
    kind, names = _read_kind(index), _stored_names(index)
    AutoConfig.from_pretrained(description, local_files_only=True)  # an error names the file of the checkpoint
    files = {name: (description / name).read_bytes() for name in _MODEL_FILES if (description / name).is_file()}
    if (base := adapter_base(checkpoint)) is not None:
        model = _load_adapted(checkpoint, index, on_meta=True)
        shapes = in_file_order(weight_shapes(model, dtype=dtype))
        weights = _naming_base(stream_full_weights(model, [name for name, _, _ in shapes], dtype), base)
    else:
        stored = {name: index.tensors[full_name] for name, full_name in names.items()}
        shapes = [
            (name, cast_dtype(torch_dtype(own["dtype"]), dtype), tuple(own["size"])) for name, own in stored.items()
        ]
        shapes = in_file_order(shapes)
        weights = _read_weights(checkpoint, index, {name: names[name] for name, _, _ in shapes}, dtype)
    write_model(kind, files, shapes, weights, description, output, config)


def _naming_base(weights: Iterator[tuple[str, Tensor]], base: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights. Raises ModelError if a file of the base model cannot be read."""
    try:
        yield from weights
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the base model {base} cannot be read ({error}): restore its files") from error


def export_adapter(checkpoint: Path, output: Path) -> None:
    """Exports the adapter of an actor's checkpoint to a folder that peft loads onto the base model.

    The arguments and errors are those of `export_model`. Also raises CheckpointError if the checkpoint has no adapter
    of a policy, and LoraError if `output` exists.
    """
    _description_folder(checkpoint)
    base = adapter_base(checkpoint)
    if base is None:
        raise CheckpointError(
            f"{checkpoint} has no adapter, because its run trained all weights (lora was not set): export without "
            f"--adapter"
        )
    index = read_index(checkpoint)
    if (kind := _read_kind(index)) != "policy":
        raise CheckpointError(
            f"{checkpoint} has the adapter of a {kind.replace('_', ' ')}, which needs its trained head: export without "
            f"--adapter"
        )
    model = _load_adapted(checkpoint, index, on_meta=False)
    assert isinstance(model, PreTrainedModel)
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


def _read_kind(index: Index) -> ModelKind:
    if any(name.startswith(_VALUE_HEAD) for name in index.tensors):
        return "critic"
    return "reward_model" if any(name.startswith(_REWARD_MODEL) for name in index.tensors) else "policy"


def _stored_names(index: Index) -> dict[str, str]:
    """Maps the names of `TrainEngine.export_weights` to those of the stored weights."""
    stored = [name for name in index.tensors if name.startswith(_MODELS)]
    return {name.removeprefix(_POLICY if name.startswith(_POLICY) else MODEL): name for name in stored}


def _read_weights(
    checkpoint: Path, index: Index, names: Mapping[str, str], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields weights by name, one at a time. `names` maps these names to those in the checkpoint. Floating-point
    weights are cast to `dtype`, if it is set.
    """
    for name, stored in names.items():
        weight = read_tensor(checkpoint, index, stored)
        yield name, weight.to(cast_dtype(weight.dtype, dtype))
        del weight  # before the next one is read


def _load_adapted(checkpoint: Path, index: Index, *, on_meta: bool) -> nn.Module:
    """Loads the base model, and adds the trained weights of a checkpoint: the adapter, and the head of a critic or a
    reward model. With `on_meta`, the weights of the base model stay on the meta device.
    """
    settings = read_json(checkpoint / DESCRIPTION / _ADAPTER)
    base, lora = ModelConfig.model_validate(settings["model"]), LoraConfig.model_validate(settings["lora"])
    kind, names = _read_kind(index), _stored_names(index)
    if kind == "critic":
        model = load_critic(base, on_meta=on_meta, merges=False)
        add_adapter(model.backbone, lora)
    elif kind == "reward_model":
        model = load_reward_model(base, head="fresh", on_meta=on_meta, merges=False)  # the checkpoint has the head
        if _SCORE_BIAS in names:  # of a critic from which the reward model started
            model.head.bias = nn.Parameter(torch.zeros(1, dtype=model.head.weight.dtype))
        add_adapter(model.language_model, lora)
    else:
        model = load_policy(base, on_meta=on_meta, merges=False)
        add_adapter(model, lora)
    trained = {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}
    if trained != {name: torch.Size(index.tensors[stored]["size"]) for name, stored in names.items()}:
        raise CheckpointError(
            f"the adapter in {checkpoint} does not match the model in {settings['model']['path']}: restore the model "
            f"that the run started with"
        )
    for name, weight in _read_weights(checkpoint, index, names):
        replace_parameter(model, name, weight)  # a trained head may have another dtype
    return model
