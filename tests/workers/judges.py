"""A tiny model that reads any text, and engines with scripted verdicts, for the tests of judges."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from flowrl.config import ModelConfig
from flowrl.engines.rollout.base import Request, Response
from tests.engines.rollout.scripted_engine import ScriptedEngine

SPECIAL = ("<pad>", "<eos>", "<user>", "<system>", "<judge>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}<judge>{% endif %}"
)


def save_judge(folder: Path, *, max_positions: int = 2048) -> ModelConfig:
    """Saves a random model with a tokenizer of bytes. Returns its settings."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_positions,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return ModelConfig(path=folder)


class VerdictEngine(ScriptedEngine):
    """Generates the text of `verdict` for each prompt."""

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        self.begin(requests)
        return [self.respond(request) for request in requests]

    def respond(self, request: Request) -> Response:
        tokenizer = self.context.tokenizer
        prompt = tokenizer.decode(list(request.context), skip_special_tokens=False)
        tokens = tokenizer.encode(self.verdict(str(prompt)) + "<eos>", add_special_tokens=False)
        return Response(request.request_id, tokens, [0.0] * len(tokens), [0] * len(tokens))

    def verdict(self, prompt: str) -> str:
        raise NotImplementedError


class EchoEngine(VerdictEngine):
    """Generates the prompt, with all special tokens as text."""

    def verdict(self, prompt: str) -> str:
        return prompt.replace("<", "(").replace(">", ")")


class LengthEngine(VerdictEngine):
    """Prefers the longer of two responses, which the prompt shows as `A=...;B=...;`. The letter x confuses it."""

    def verdict(self, prompt: str) -> str:
        first, second = prompt.partition("A=")[2].partition(";B=")[0], prompt.partition(";B=")[2].partition(";")[0]
        if "x" in first + second:
            return "I cannot decide."
        better = "C" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
        return f"First I thought [[B]], but the verdict is [[{better}]]"


class BiasedEngine(VerdictEngine):
    """Always prefers the first response."""

    def verdict(self, prompt: str) -> str:
        return "[[A]]"


def count_letters(text: str, letter: str = "e") -> float | None:
    """Verdict parser: the number of a letter. None without it."""
    return text.count(letter) or None


def score_text(text: str) -> float:
    """Verdict parser that gives every text a score from 0 to 1."""
    return sum(text.encode()) % 101 / 100


def fail(text: str) -> float:
    raise RuntimeError(f"{len(text)} characters")


def interrupt(text: str) -> float:
    raise KeyboardInterrupt
