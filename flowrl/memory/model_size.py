"""How large a model is, from its `config.json` alone.

Widths are numbers of a token's states: D of the hidden states, Q of all queries, K of all keys (or values), M of the
widest part of a layer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Linears = tuple[tuple[str, int, int], ...]
"""Name, inputs and outputs of a layer's matrices."""


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, and widths that decide how large activations are."""

    kind: str
    """`model_type` of the configuration."""
    layers: int
    hidden: int
    """D."""
    queries: int
    """Q, heads x width of a head."""
    keys: int
    """K."""
    mlp: int
    """M."""
    heads: int
    """Heads of queries."""
    vocabulary: int
    linears: Linears
    layer_matrices: int
    """Parameters of one layer that tensor parallelism cuts: matrices and their biases."""
    layer_rest: int
    """Those that it does not: norms."""
    embedding: int
    """Parameters of the input embeddings, which are as many as those of the head."""
    rest: int
    """Parameters outside of layers, embedding and head: norms, positions, projections."""
    tied: bool
    """Whether the head's weights are the embeddings'."""
    window: int | None = None
    """Tokens that a layer sees of longer rows; None is all."""

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self.layer_matrices + self.layer_rest

    @property
    def ends(self) -> int:
        """Parameters outside of layers."""
        return self.embedding * (1 if self.tied else 2) + self.rest

    @property
    def backbone_ends(self) -> int:
        """The same of a model that has no head over the vocabulary, such as a critic."""
        return self.embedding + self.rest

    @property
    def parameters(self) -> int:
        """All of a language model."""
        return self.layers * self.layer + self.ends

    def adapted(self, targets: Literal["all_linear"] | Sequence[str]) -> Linears:
        """The matrices of a layer that `lora.targets` names, each by what follows the last dot of a target: where two
        have that name, as c_proj in GPT-2, both; and in all layers, where a target has the number of one."""
        if targets == "all_linear":
            return self.linears
        names = {target.rpartition(".")[2] for target in targets}
        return tuple(linear for linear in self.linears if linear[0] in names)


def model_size(folder: Path) -> ModelSize | None:
    """The size of the model in a folder; None where there is no `config.json` of a family of docs/models.md."""
    try:
        return size_of(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def size_of(settings: dict[str, Any]) -> ModelSize | None:  # Any: as the file has it
    """The size of a model with these settings; None for another family than those of docs/models.md."""
    kind = settings["model_type"]
    if kind == "gpt2":
        return _gpt2(settings)
    if kind == "opt":
        return _opt(settings)
    return _llama_like(kind, settings) if kind in _NORMS else None


_NORMS = {"llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 2, "gemma": 2, "gemma2": 4, "glm": 2, "glm4": 4}
"""Norms of the hidden states in a layer."""


def _llama_like(kind: str, settings: dict[str, Any]) -> ModelSize:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    width = settings.get("head_dim") or hidden // heads
    queries, keys = heads * width, (settings.get("num_key_value_heads") or heads) * width
    biases = queries + 2 * keys if kind == "qwen2" or settings.get("attention_bias") else 0
    if kind in ("llama", "qwen3") and biases:
        biases += hidden
    mlp, head_norms = settings["intermediate_size"], 2 * width if kind == "qwen3" else 0
    inner = (("gate_proj", hidden, mlp), ("up_proj", hidden, mlp))
    if kind.startswith("glm"):
        inner = (("gate_up_proj", hidden, 2 * mlp),)
    linears = (*_attention(hidden, queries, keys, "o_proj"), *inner, ("down_proj", mlp, hidden))
    return ModelSize(
        kind=kind,
        layers=settings["num_hidden_layers"],
        hidden=hidden,
        queries=queries,
        keys=keys,
        mlp=mlp,
        heads=heads,
        vocabulary=settings["vocab_size"],
        linears=linears,
        layer_matrices=_sizes(linears) + biases,
        layer_rest=_NORMS[kind] * hidden + head_norms,
        embedding=settings["vocab_size"] * hidden,
        rest=hidden,
        tied=settings.get("tie_word_embeddings", kind.startswith("gemma")),
        window=settings.get("sliding_window") if settings.get("use_sliding_window", kind == "mistral") else None,
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
    kind: str, settings: dict[str, Any], linears: Linears, *, layers: int, heads: int, embedding: int, rest: int
) -> ModelSize:
    """A family whose matrices and two norms of a layer all have biases, with as many heads of keys as of queries.

    Args:
        linears: of a layer, the last of them from M to D.
    """
    _, mlp, hidden = linears[-1]
    return ModelSize(
        kind=kind,
        layers=layers,
        hidden=hidden,
        queries=hidden,
        keys=hidden,
        mlp=mlp,
        heads=heads,
        vocabulary=settings["vocab_size"],
        linears=linears,
        layer_matrices=_sizes(linears) + 5 * hidden + mlp,
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


def _sizes(linears: Linears) -> int:
    return sum(inputs * outputs for _, inputs, outputs in linears)
