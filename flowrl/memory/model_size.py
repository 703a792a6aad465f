"""Reads parameter counts and layer widths from a model's `config.json`: in its folder, in the cache of the Hub, or in
`published_sizes.json`, which has the sizes of the models that recipes name.

Widths per token: D hidden states, Q all query heads, K all key heads (values have the same width), M the MLP.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flowrl.config.source import read_json
from flowrl.data.folders.input_paths import find_model_file, is_hub_name
from flowrl.data.mixture import read_mixture
from flowrl.engines.train.pipeline.stage_schedule import StageLayers, split_layers

PUBLISHED = Path(__file__).parent / "published_sizes.json"
"""Hub name -> settings in its `config.json` that determine the memory."""

Linears = tuple[tuple[str, int, int], ...]
"""(name, input width, output width) of each matrix of a layer."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts and layer widths of a model."""

    family: str
    """`model_type` in the model's configuration."""
    layers: int
    hidden: int
    """Width D of the hidden states."""
    queries: int
    """Width Q of all query heads."""
    keys: int
    """Width K of all key heads."""
    mlp: int
    """Width M of the MLP."""
    heads: int
    vocabulary: int
    linears: Linears
    layer_matrices: int
    """Number of parameters per layer that tensor parallelism shards (matrices and their biases)."""
    layer_rest: int
    """Number of parameters per layer that tensor parallelism replicates (norms, routers and routed experts)."""
    embedding: int
    """Number of parameters of the input embeddings."""
    rest: int
    """Number of parameters outside layers, embeddings and head, such as the final norm."""
    tied: bool
    """Whether the head shares the weights of the input embeddings."""
    experts: int = 0
    """Number of parameters of the routed experts of a layer, which `layer_rest` contains."""
    num_experts: int = 0
    """Number of routed experts of a layer; 0 for a dense model."""
    expert_width: int = 0
    """Width of the hidden layer of a routed expert."""
    experts_per_token: int = 0
    """Number of routed experts that process a token in a layer."""
    dense_surplus: int = 0
    """Number of parameters by which the layers without experts are smaller than the other layers, in total."""
    config: str = ""
    """Text of `config.json`, from which flowrl/engines/train/layer_trace.py builds layers."""

    @property
    def layer(self) -> int:
        return self.layer_matrices + self.layer_rest

    @property
    def non_layer(self) -> int:
        """Number of parameters outside the layers, including the language-model head."""
        return self.embedding * (1 if self.tied else 2) + self.rest

    @property
    def backbone_non_layer(self) -> int:
        """Number of parameters outside the layers of a model without a language-model head, such as a critic."""
        return self.embedding + self.rest

    @property
    def parameters(self) -> int:
        return self.layers * self.layer - self.dense_surplus + self.non_layer

    @property
    def cached_values(self) -> int:
        """Number of keys and values that a KV cache has per token."""
        return 2 * self.keys * self.layers

    @property
    def largest_weight(self) -> int:
        """Number of parameters of the largest weight. The gate and up matrices of all experts of a layer are one
        weight.
        """
        experts = 2 * self.experts // 3
        return max(self.embedding, experts, *(inputs * outputs for _, inputs, outputs in self.linears))

    def stages(self, num_stages: int, *, has_head: bool) -> list[StageLayers]:
        """Returns the layers of each pipeline stage. `has_head` is True if the last stage has a language-model head."""
        return split_layers([self.layer] * self.layers, num_stages, head=self.embedding if has_head else 0)

    def adapted(self, targets: Literal["all_linear"] | Sequence[str]) -> Linears:
        """Returns the matrices of a layer that match `lora.targets`.

        Only the part of a target after the last dot is compared, so a target matches matrices in every layer.
        """
        if targets == "all_linear":
            return self.linears
        names = {target.rpartition(".")[2] for target in targets}
        return tuple(linear for linear in self.linears if linear[0] in names)


def read_model_size(model: Path) -> ModelSize | None:
    """Returns the size of a model in a folder or on the Hub, or None if the model is not on this machine or its family
    is unsupported.
    """
    try:
        return model_size_from_config(_read_config(model))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_size_problem(model: Path) -> str | None:
    """Returns why `read_model_size` returns None for a model, or None if it returns a size."""
    if read_model_size(model) is not None:
        return None
    if is_hub_name(model) and find_model_file(model, "config.json") is None:
        return "whose config.json is not in the cache of the Hub: download the model, or set its directory"
    if not is_hub_name(model) and not model.is_dir():
        return "which is not a directory: correct the path"
    try:
        family = _read_config(model)["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return "which has no config.json with a model_type: save the model with save_pretrained"
    if family in (*_NORMS, *_MIXTURES, "gpt2", "opt"):
        return f"whose config.json lacks sizes of the family {family}: save the model with save_pretrained"
    return f"whose family {family} has no estimate (docs/models.md lists the families)"


def _read_config(model: Path) -> dict[str, Any]:  # Any: JSON values
    file = find_model_file(model, "config.json")
    if file is None and is_hub_name(model):
        return read_json(PUBLISHED)[str(model)]
    return read_json(model / "config.json" if file is None else file)


def model_size_from_config(settings: dict[str, Any]) -> ModelSize | None:  # Any: JSON values
    """Returns the size of a model with this configuration; None if docs/models.md does not list the model family."""
    family = settings["model_type"]
    if family not in (*_NORMS, *_MIXTURES, "gpt2", "opt"):
        return None
    read = {"gpt2": _gpt2, "opt": _opt, **dict.fromkeys(_MIXTURES, _mixture)}.get(family, _llama_like)
    return replace(read(settings), config=json.dumps(settings, sort_keys=True, default=str))


_NORMS = {"llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 2, "gemma": 2, "gemma2": 4, "glm": 2, "glm4": 4}
"""Number of norms over the hidden states per layer."""


def _llama_like(settings: dict[str, Any]) -> ModelSize:
    family = settings["model_type"]
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    width = settings.get("head_dim") or hidden // heads
    queries, keys = heads * width, (settings.get("num_key_value_heads") or heads) * width
    biases = queries + 2 * keys if family == "qwen2" or settings.get("attention_bias") else 0
    if family in ("llama", "qwen3") and biases:
        biases += hidden
    mlp, head_norms = settings["intermediate_size"], 2 * width if family == "qwen3" else 0
    inner = (("gate_proj", hidden, mlp), ("up_proj", hidden, mlp))
    if family.startswith("glm"):
        inner = (("gate_up_proj", hidden, 2 * mlp),)
    linears = (*_attention(hidden, queries, keys, "o_proj"), *inner, ("down_proj", mlp, hidden))
    return ModelSize(
        family=family,
        layers=settings["num_hidden_layers"],
        hidden=hidden,
        queries=queries,
        keys=keys,
        mlp=mlp,
        heads=heads,
        vocabulary=settings["vocab_size"],
        linears=linears,
        layer_matrices=_num_weights(linears) + biases,
        layer_rest=_NORMS[family] * hidden + head_norms,
        embedding=settings["vocab_size"] * hidden,
        rest=hidden,
        tied=settings.get("tie_word_embeddings", family.startswith("gemma")),
    )


_MIXTURES = ("mixtral", "qwen3_moe")
"""Families of mixtures of experts whose attention is that of Llama or Qwen3."""


def _mixture(settings: dict[str, Any]) -> ModelSize:
    """Returns the size of a mixture of experts: the size of a dense model, with experts instead of the MLP."""
    mixture = read_mixture(settings)
    if mixture is None:
        raise ValueError("the configuration has no experts, or lacks their sizes")
    dense = _llama_like(settings | {"model_type": "qwen3" if mixture.family == "qwen3_moe" else "llama"})
    mlp, attention = _num_weights(dense.linears[-3:]), dense.linears[:-3]
    experts = mixture.num_experts * 3 * dense.hidden * mixture.expert_width
    router = mixture.num_experts * dense.hidden
    return replace(
        dense,
        family=mixture.family,
        mlp=mixture.per_token * mixture.expert_width,
        linears=attention,
        layer_matrices=dense.layer_matrices - mlp,
        layer_rest=dense.layer_rest + experts + router,
        experts=experts,
        num_experts=mixture.num_experts,
        expert_width=mixture.expert_width,
        experts_per_token=mixture.per_token,
        dense_surplus=mixture.has_experts.count(False) * (experts + router - mlp),
    )


def _gpt2(settings: dict[str, Any]) -> ModelSize:
    hidden = settings["n_embd"]
    mlp = settings.get("n_inner") or 4 * hidden
    linears = (
        ("c_attn", hidden, 3 * hidden),
        ("c_proj", hidden, hidden),
        ("c_fc", hidden, mlp),
        ("c_proj", mlp, hidden),
    )
    return _with_biases(
        "gpt2",
        settings,
        linears,
        layers=settings["n_layer"],
        heads=settings["n_head"],
        embedding=settings["vocab_size"] * hidden,
        rest=(settings["n_positions"] + 2) * hidden,
    )


def _opt(settings: dict[str, Any]) -> ModelSize:
    hidden, mlp = settings["hidden_size"], settings["ffn_dim"]
    embedded = settings.get("word_embed_proj_dim") or hidden
    projections = 2 * embedded * hidden if embedded != hidden else 0
    last_norm = 2 * hidden if settings.get("do_layer_norm_before", True) else 0
    linears = (*_attention(hidden, hidden, hidden, "out_proj"), ("fc1", hidden, mlp), ("fc2", mlp, hidden))
    return _with_biases(
        "opt",
        settings,
        linears,
        layers=settings["num_hidden_layers"],
        heads=settings["num_attention_heads"],
        embedding=settings["vocab_size"] * embedded,
        rest=(settings["max_position_embeddings"] + 2) * hidden + projections + last_norm,
    )


def _with_biases(
    family: str, settings: dict[str, Any], linears: Linears, *, layers: int, heads: int, embedding: int, rest: int
) -> ModelSize:
    """Returns the size of a model with biases. The last matrix of `linears` maps M to D."""
    _, mlp, hidden = linears[-1]
    return ModelSize(
        family=family,
        layers=layers,
        hidden=hidden,
        queries=hidden,
        keys=hidden,
        mlp=mlp,
        heads=heads,
        vocabulary=settings["vocab_size"],
        linears=linears,
        layer_matrices=_num_weights(linears) + 5 * hidden + mlp,
        layer_rest=4 * hidden,
        embedding=embedding,
        rest=rest,
        tied=True,
    )


def _attention(hidden: int, queries: int, keys: int, output: str) -> Linears:
    return (
        ("q_proj", hidden, queries),
        ("k_proj", hidden, keys),
        ("v_proj", hidden, keys),
        (output, queries, hidden),
    )


def _num_weights(linears: Linears) -> int:
    return sum(inputs * outputs for _, inputs, outputs in linears)
