"""Checks the files of a model against parallel sizes, LoRA targets, sequence lengths and token ids, before it is
loaded.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config import (
    ONE_DEVICE,
    ConfigError,
    CriticConfig,
    EngineConfig,
    LoraConfig,
    ModelRoleConfig,
    ReplicaSizes,
    RewardModelConfig,
    ScoringModelConfig,
    TrainedConfig,
)
from flowrl.config.engines.rollout_engines import get_capabilities
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.config.source import read_json
from flowrl.controller.placement.plan import Mesh, RolePlan
from flowrl.data.folders.input_paths import MAX_POSITIONS, read_text_config
from flowrl.data.mixture import ROUTER_SCORES, read_mixture
from flowrl.engines.train.pipeline.stage_schedule import FAMILIES, StageLayers
from flowrl.memory.model_size import ModelSize, read_model_size
from flowrl.memory.role_memory import NF4_VALUES

_HIDDEN, _HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
"""Keys of the width of the hidden states and of the number of attention heads."""


def check_model_fit(role: str, model: ModelRoleConfig, role_plan: RolePlan) -> None:
    """Raises ConfigError if tp or sp does not divide the model's sizes, if it has fewer layers than pp stages, or no
    layer for a LoRA target.

    Missing models and unsupported families are not checked, because loading them reports the error.
    """
    if model.model is None:
        return
    settings, size = read_text_config(model.model.path), read_model_size(model.model.path)
    if model.engine.expert_parallel:
        _check_experts(role, settings, model.engine, role_plan.mesh)
    if size is None:
        if model.engine.kind == DEFAULT_TRAIN_ENGINE:
            _check_settings(role, settings, role_plan.mesh)
        return
    if role_plan.mesh.tp > 1:
        _check_tp(role, size, role_plan.mesh.tp)
    if role_plan.mesh.sp > 1:
        _check_sp(role, size, role_plan.mesh.sp)
    if role_plan.mesh.pp > 1 and model.engine.kind == DEFAULT_TRAIN_ENGINE:
        _check_pp(role, size, role_plan.mesh.pp)
    if isinstance(model, TrainedConfig) and model.lora is not None:
        _check_adapter(role, size, model.lora, size.stages(role_plan.mesh.pp, has_head=has_head(model)))


def has_head(model: ModelRoleConfig) -> bool:
    """Returns whether the model of a role has a language-model head."""
    return not isinstance(model, CriticConfig | ScoringModelConfig | RewardModelConfig)


def _check_adapter(role: str, size: ModelSize, lora: LoraConfig, stages: Sequence[StageLayers]) -> None:
    """Raises ConfigError if a LoRA target is not in the model, if a pipeline stage has no target, or if the blocks
    of nf4 do not fill a matrix.
    """
    if lora.targets != "all_linear":
        for target in lora.targets:
            if not size.adapted((target,)):
                names = {name for name, _, _ in size.linears}
                raise ConfigError(
                    f"{role}.lora.targets: {size.family} has no linear layer {target!r}; available: "
                    f"{', '.join(sorted(names))}"
                )
        indices = [[int(part) for part in target.split(".") if part.isdigit()] for target in lora.targets]
        for i, stage in enumerate(stages if all(indices) and len(stages) > 1 else ()):
            if not any(stage.start <= index < stage.end for (index, *_) in indices):
                raise ConfigError(
                    f"{role}.lora.targets adapts no layer of pipeline stage {i} (layers {stage.start} to "
                    f"{stage.end - 1}): add a target in these layers, or make placement.roles.{role}.pp smaller"
                )
    for name, inputs, outputs in size.adapted(lora.targets) if lora.base_quantization == "nf4" else ():
        if inputs * outputs % NF4_VALUES:
            raise ConfigError(
                f"{role}.lora.base_quantization is nf4, which needs matrices of a multiple of {NF4_VALUES} values, but "
                f"{name} has {inputs} x {outputs}: set it to int8, or leave {name} out of {role}.lora.targets"
            )


def find_replica_problem(model: Path, replica: ReplicaSizes) -> str | None:
    """Returns why vLLM cannot divide a model among the devices of a replica, as the end of a sentence. Returns None if
    it can, or if the size of the model is unknown.
    """
    size = read_model_size(model)
    if size is None or replica == ONE_DEVICE:
        return None
    key_heads, tp = _key_heads(size), replica.tp
    columns = size.mlp // max(1, size.experts_per_token)
    for noun, count in (("attention heads", size.heads), ("MLP columns", columns)):
        if count % tp:
            return f"tp {tp}, which does not divide the model's {count} {noun}: set tp to a divisor"
    # With fewer heads than devices, each head is on several devices.
    if key_heads % tp and tp % key_heads:
        return f"tp {tp}, which neither divides the {key_heads} key-value heads nor is divisible by them: change tp"
    if replica.pp > size.layers:
        return f"pp {replica.pp}, but the model has {size.layers} layers: set pp to at most {size.layers}"
    return None


def read_max_positions(model: Path) -> int | None:
    """Returns the maximum sequence length in a model's `config.json`; None if there is none or it is unknown."""
    sizes = read_text_config(model)
    return next((sizes[name] for name in MAX_POSITIONS if name in sizes), None)


def read_head_size(model: Path) -> int | None:
    """Returns the size of an attention head in a model's `config.json`; None if it is missing or unknown."""
    sizes = read_text_config(model)
    if sizes.get("head_dim") is not None:
        size = sizes["head_dim"]
        return size if isinstance(size, int) else None
    hidden, heads = (next((sizes[name] for name in names if name in sizes), None) for names in (_HIDDEN, _HEADS))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def find_head_size_problem(engine: str, model: Path, device: str) -> str | None:
    """Returns the problem if an engine does not support the attention heads of a model on a kind of device.

    The caller adds the fix, which depends on the engines that it can use.
    """
    supported, size = get_capabilities(engine).head_sizes.get(device), read_head_size(model)
    if supported is None or size is None or size in supported:
        return None
    *others, last = map(str, supported)
    return (
        f"engine {engine} supports attention heads of size {', '.join(others)} or {last} on a {device} device, but "
        f"those of the model in {model} have size {size}"
    )


def read_num_token_ids(folder: Path) -> tuple[int, int] | None:
    """Returns the largest token id of the tokenizer in `folder` plus 1, without and with its added tokens.

    An added token occurs only if a text or a template contains it. Returns None if `tokenizer.json` cannot be read.
    """
    try:
        settings = read_json(folder / "tokenizer.json")
        vocabulary = settings["model"]["vocab"]
        # Unigram models have a list of (token, score), in which the index is the id.
        ids = set(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
        added = {token["id"] for token in settings.get("added_tokens") or ()}
        return max(ids - added, default=-1) + 1, max(ids | added) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_weight_names(folder: Path) -> frozenset[str]:
    """Returns the names of the weights in the safetensors files of `folder`; empty if they cannot be read."""
    try:
        if (index := folder / "model.safetensors.index.json").is_file():
            return frozenset(read_json(index)["weight_map"])
        with (folder / "model.safetensors").open("rb") as file:
            # The file starts with the length of its JSON header, which has an entry per weight.
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return frozenset(header) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return frozenset()


def excess_tokens_message(setting: str, num_tokens: int, model: Path, max_positions: int) -> str:
    """Returns the error message for sequences that are longer than a model supports."""
    return f"{setting} is {num_tokens}, but the model in {model} supports at most {max_positions} tokens: lower it"


def _check_experts(role: str, settings: Mapping[str, Any], engine: EngineConfig, mesh: Mesh) -> None:
    """Raises ConfigError if the experts of a model cannot be divided over the ranks that share a copy of it."""
    if not settings:
        return
    mixture, key = read_mixture(settings), f"{role}.engine.expert_parallel"
    if mixture is None:
        raise ConfigError(
            f"{key} is true, but the model is no mixture of experts of the families {', '.join(ROUTER_SCORES)}: "
            f"remove it"
        )
    num_ranks = mesh.shard_ranks(engine.shard_ranks) * mesh.sp
    if mixture.num_experts % num_ranks:
        raise ConfigError(
            f"{key} is true, but the model's {mixture.num_experts} experts cannot be divided over the {num_ranks} "
            f"ranks that share a copy of it: set {role}.engine.shard_ranks to a divisor, or remove {key}"
        )


def _check_settings(role: str, settings: Mapping[str, Any], mesh: Mesh) -> None:
    """Raises ConfigError if a model whose size is unknown does not support tp, sp or pp, by its `config.json`."""
    heads, family = next((settings[name] for name in _HEADS if name in settings), None), settings.get("model_type")
    if mesh.pp > 1 and isinstance(family, str):
        _check_family(role, family, mesh.pp)
    for name, ranks in (("tp", mesh.tp), ("sp", mesh.sp)):
        if isinstance(heads, int) and heads > 0 and heads % ranks:
            raise ConfigError(
                f"placement.roles.{role}.{name} is {ranks}, which does not divide the model's {heads} attention heads: "
                f"set {name} to a divisor"
            )


def _check_tp(role: str, size: ModelSize, tp: int) -> None:
    where = f"placement.roles.{role}.tp is {tp}"
    mlp = 0 if size.experts else size.mlp  # each rank computes complete experts
    for noun, count in (("attention heads", size.heads), ("key-value heads", _key_heads(size)), ("MLP columns", mlp)):
        if count % tp:
            raise ConfigError(f"{where}, which does not divide the model's {count} {noun}: set tp to a divisor")


def _check_sp(role: str, size: ModelSize, sp: int) -> None:
    """Raises ConfigError unless sp divides the query heads and divides, or is divisible by, the key heads."""
    keys = _key_heads(size)
    if size.heads % sp or (keys % sp and sp % keys):
        raise ConfigError(
            f"placement.roles.{role}.sp is {sp}, but the model has {size.heads} attention heads and {keys} key "
            f"heads: set sp to a divisor of both"
        )


def _check_pp(role: str, size: ModelSize, pp: int) -> None:
    _check_family(role, size.family, pp)
    if pp > size.layers:
        raise ConfigError(
            f"placement.roles.{role}.pp is {pp}, but the model has {size.layers} layers: set pp to at most "
            f"{size.layers}"
        )


def _check_family(role: str, family: str, pp: int) -> None:
    if family not in FAMILIES:
        raise ConfigError(
            f"placement.roles.{role}.pp is {pp}, which {family} does not support: remove pp, or use another model "
            f"family"
        )


def _key_heads(size: ModelSize) -> int:
    return size.keys * size.heads // size.queries
