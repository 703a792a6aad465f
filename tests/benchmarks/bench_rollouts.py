"""Model, baselines and timed functions of the rollout benchmark.

The model generates token i after token i + 1, so each response counts down from the last token of its prompt to the end
token. The outputs of attention and MLPs are 0, but they are computed. flowrl and the baseline therefore generate the
same tokens, in responses of chosen lengths.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StaticCache

from flowrl import Worker
from flowrl.config import RolloutConfig
from flowrl.engines.models.weights import gathered_weights, meta_copy
from flowrl.engines.rollout.base import Response
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.workers import Rollout

END, FIRST, LAST = 1, 2, 1023
"""End token, and the smallest and largest token of a prompt. Token 0 is padding."""

PEAK = 32.0
"""Logit of the next token. All other logits are close to 0."""

SIZES = {"1M": (128, 4, 4, 1024), "26M": (512, 7, 8, 4096)}
"""Name -> width, number of layers, number of heads (of width 32 and 64), and vocabulary size."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Measurement:
    """Number of tokens and duration of one measurement."""

    tokens: int
    seconds: float
    cpu_s: float
    """CPU time of all threads of the generating process. For a call through Ray, also of the driver."""


def count_down_model(width: int, layers: int, heads: int, vocabulary: int) -> LlamaForCausalLM:
    """Returns a model that generates token i after token i + 1."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=END,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        embedding = torch.randn(vocabulary, width)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(PEAK / width * embedding.roll(-1, 0))
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    return model


def count_down_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": END, **{f"n{i}": i for i in range(FIRST, vocabulary)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def save_model(size: str, folder: Path) -> None:
    """Writes the model and its tokenizer."""
    width, layers, heads, vocabulary = SIZES[size]
    count_down_model(width, layers, heads, vocabulary).save_pretrained(folder)
    count_down_tokenizer(vocabulary).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Returns distinct prompts of 16 to 64 tokens whose responses have the lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(15, 64, (len(lengths),), generator=generator).tolist()
    starts = [torch.randint(FIRST, LAST + 1, (size,), generator=generator).tolist() for size in sizes]
    return [[*start, END + length] for start, length in zip(starts, lengths, strict=True)]


def measure(call: Callable[[], int]) -> Measurement:
    """Times a function that returns its number of tokens."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    tokens = call()
    return Measurement(tokens, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


# Functions for `group.run`, which run in the workers' processes.


def processor_seconds(worker: Worker) -> float:
    """Returns the CPU seconds of this process since its start."""
    return time.process_time()


def num_tokens(responses: Sequence[Response]) -> int:
    return sum(len(response.token_ids) for response in responses)


def engine_generate(worker: Rollout, prompts: Prompts, seed: int) -> Measurement:
    """Measures the engine without Ray."""
    row_N = torch.arange(len(prompts))
    requests = make_requests(prompts, row_N, torch.zeros_like(row_N), seed=seed)
    return measure(lambda: num_tokens(worker.engine.generate(requests)))


def transformers_generate(worker: Rollout, prompts: Prompts, rows: int, limit: int) -> Measurement:
    """Measures `model.generate` in batches of a fixed number of rows."""
    owner: Any = worker.engine
    model: Any = meta_copy(owner.model)  # with the attention of transformers

    def run() -> int:
        tokens = 0
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])
            present = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            output = model.generate(ids, attention_mask=present, do_sample=True, top_k=0, max_new_tokens=limit)
            tokens += int((output[:, width:] != 0).sum())
        return tokens

    with gathered_weights(model, owner.model):
        return measure(run)


def decode_steps(worker: Rollout, rows: int, length: int, steps: int) -> dict[str, Measurement]:
    """Times decode steps with prompts of `length` tokens: the sampler, and a bare forward pass with either cache."""
    owner: Any = worker.engine
    model: Any = meta_copy(owner.model)  # with the attention of transformers
    prompts, row_N = [[FIRST + row, *[LAST] * (length - 1)] for row in range(rows)], torch.arange(rows)

    def sampler(limit: int) -> Measurement:
        config = RolloutConfig(max_response_tokens=limit, max_num_seqs=rows)
        engine = HfRollout(owner.model, worker.tokenizer.tokenizer, config)
        requests = make_requests(prompts, row_N, torch.zeros_like(row_N), seed=0)
        return measure(lambda: num_tokens(engine.generate(requests)))

    def bare(cache: Any) -> Measurement:
        with torch.no_grad():
            model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
            token = torch.full((rows, 1), FIRST)

            def run() -> int:
                for step in range(steps):
                    position = torch.full((1, 1), length + step)
                    model(token, past_key_values=cache, position_ids=position)
                return rows * steps

            return measure(run)

    first, total = sampler(1), sampler(1 + steps)
    with gathered_weights(model, owner.model):
        return {
            "ours": Measurement(rows * steps, total.seconds - first.seconds, total.cpu_s - first.cpu_s),
            "DynamicCache": bare(DynamicCache(config=model.config)),
            "StaticCache": bare(StaticCache(config=model.config, max_cache_len=length + steps)),
        }


class BareLlm(Worker):
    """vLLM's `LLM` with the settings and the environment of flowrl's engine."""

    replicated = stateless = True

    def __init__(self, folder: Path, rows: int) -> None:
        import_module("flowrl.engines.rollout.vllm.engine")  # sets the environment that vLLM reads
        from vllm import LLM  # noqa: PLC0415 (only in this process)

        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=10**9,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
        )


def llm_generate(worker: BareLlm, prompts: Prompts, limit: int, seed: int | None) -> Measurement:
    """Measures `LLM.generate`; with a seed, every request has its own seed, as in flowrl."""
    from vllm import SamplingParams  # noqa: PLC0415 (only in this process)

    def run() -> int:
        settings: Any = {"temperature": 1.0, "max_tokens": limit, "stop_token_ids": [END], "ignore_eos": True}
        settings |= {"logprobs": 0, "detokenize": False}
        seeds = [seed * len(prompts) + row for row in range(len(prompts))] if seed is not None else []
        sampling = [SamplingParams(**settings, seed=row) for row in seeds] or SamplingParams(**settings)
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = worker.llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(row.outputs[0].token_ids) for row in outputs)

    return measure(run)
