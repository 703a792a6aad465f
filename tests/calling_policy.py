"""A small policy that calls tools without any training, for tests of environments and tools."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.quickstart.prepare import CHARACTERS, SPECIAL, save_model, save_tokenizer
from recipes.reasoning.prepare import BYTES
from recipes.tools.prepare import CHAT_TEMPLATE

EOS = SPECIAL.index("<eos>")
DIGITS = CHARACTERS[:10]


def call_of(tool: str) -> str:
    """Returns the text that calls a tool without arguments."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {}})}</tool_call>"


def save_calling_policy(folder: Path, tools: Sequence[str], seed: int = 0) -> None:
    """Saves a byte tokenizer in which the call of each tool is one token, and a model that calls tools.

    After the end of a message, the model samples a call with probability 0.5, or else mostly a digit. The next token is
    mostly the end token. The weights that produce this are set by hand: three features of the last token determine the
    next token, and the layers add nothing to them before they are trained.
    """
    calls = [call_of(tool) for tool in tools]
    save_tokenizer(folder, BYTES, CHAT_TEMPLATE, words=calls)
    save_model(folder, seed, num_characters=len(BYTES) + len(calls), max_tokens=512)
    config = Qwen2Config.from_pretrained(folder)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    first_call, newline = len(SPECIAL) + len(BYTES), len(SPECIAL) + BYTES.index("Ċ")
    digits = [len(SPECIAL) + BYTES.index(digit) for digit in DIGITS]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
                weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, :3] = torch.tensor([1.0, 0.0, 0.0])  # every token, a call, the end of a message
        embedding[:, 3:] *= 0.1
        embedding[first_call:, 1] = 1.0
        embedding[newline, 2] = 1.0
        head.zero_()
        head[EOS, :3] = torch.tensor([0.7, 0.3, -0.7])
        head[first_call:, 2] = 1.0 if len(calls) == 1 else 0.92
        head[digits, 2] = 0.7
    model.save_pretrained(folder)
