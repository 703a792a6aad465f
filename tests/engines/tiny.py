"""Tiny models with two layers and random weights, and a tokenizer of 32 letters."""

from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from flowrl.engines.models.routing import mixture_of
from tests.engines.tables import VOCABULARY

AnyModel = TypeVar("AnyModel", bound=PreTrainedModel)

END = 1
SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": END,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


class RMSNorm(nn.Module):
    """RMS norm in the dtype of its input; those of transformers compute in float32 even for float64 models."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)


class RotaryEmbedding(nn.Module):
    """Rotary embedding in float64; those of transformers compute in float32 even for float64 models."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(frequencies.double(), persistent=False)

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(states.dtype), angles.sin().to(states.dtype)


class Qwen3MoeRouter(Qwen3MoeTopKRouter):
    """Router in the dtype of its input; that of transformers computes probabilities in float32."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, experts


def to_float64(model: AnyModel) -> AnyModel:
    """Converts a model to float64 in place, including the computation of its norms and routers; returns it."""
    model.double()
    if mixture_of(model) is not None:
        model.set_experts_implementation("eager")
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("Qwen2RMSNorm", "LlamaRMSNorm", "Qwen3MoeRMSNorm"):
            owner, _, leaf = name.rpartition(".")
            assert isinstance(module.weight, nn.Parameter) and isinstance(module.variance_epsilon, float)
            setattr(model.get_submodule(owner), leaf, RMSNorm(module.weight, module.variance_epsilon))
        elif isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = Qwen3MoeRouter
    return model


def with_float64_rotary(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Makes the rotary embedding of a model compute in float64, in place; returns the model."""
    frequencies = model.model.rotary_emb.inv_freq
    assert isinstance(frequencies, torch.Tensor)
    model.model.rotary_emb = RotaryEmbedding(frequencies)  # pyright: ignore[reportAttributeAccessIssue] (called alike)
    return model


def qwen2(dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> Qwen2ForCausalLM:
    """Returns a Qwen2 with large weights, so that outputs depend strongly on inputs."""
    torch.manual_seed(seed)
    config = Qwen2Config(**{"hidden_size": 64, "tie_word_embeddings": True, **SIZES, **settings})
    return Qwen2ForCausalLM(config).to(dtype).eval()  # pyright: ignore[reportArgumentType] (transformers narrows `to`)


def qwen3_moe(seed: int = 0, **settings) -> Qwen3MoeForCausalLM:
    """Returns a mixture of four experts in each layer, two of them per token."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **settings})).eval()


def llama(seed: int = 0, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{"hidden_size": 32, **SIZES, **settings})).eval()


def convolving() -> Lfm2ForCausalLM:
    """Returns a model with convolutions, which mix tokens outside of attention."""
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**{"hidden_size": 32, **SIZES, "layer_types": ["conv", "full_attention"]})).eval()


def classifier() -> Qwen2ForSequenceClassification:
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(Qwen2Config(**{"hidden_size": 32, "num_labels": 1, **SIZES})).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": END, **{chr(95 + i): i for i in range(2, VOCABULARY)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), eos_token="<end>", pad_token="<pad>"
    )


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
