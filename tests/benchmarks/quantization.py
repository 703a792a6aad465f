"""Compares a quantized with a float rollout on a model of 100 million parameters; see docs/rollout.md.

`python -m tests.benchmarks.quantization` prints one line of JSON per figure.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import RolloutConfig
from flowrl.engines.models.int8 import quantized_copy
from flowrl.engines.models.weights import full_weights, write_weights
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from tests.benchmarks.measure import Figure, alone, paired, read_arguments
from tests.engines.tiny import tokenizer

PROMPT, RESPONSE = 16, 16


def model(num_layers: int) -> Qwen2ForCausalLM:
    """Returns layers of width 768 with tied embeddings and default initialization. GPT-2 small has 12 of them."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def num_bytes(engine: HfRollout) -> int:
    return sum(tensor.nbytes for tensor in {*engine.model.parameters(), *engine.model.buffers()})


def generation(floats: HfRollout, integers: HfRollout, rows: int, repeats: int) -> Figure:
    prompts = [[2 + (row * 7 + i) % 8000 for i in range(PROMPT)] for row in range(rows)]
    row_ids = torch.arange(rows)

    def of(engine: HfRollout):
        return lambda: engine.generate(make_requests(prompts, row_ids, row_ids, seed=0))

    what = f"{rows} rows of {PROMPT} + {RESPONSE} tokens, int8 compared with float32, CPU time"
    return paired(what, of(integers), of(floats), repeats, clock=time.thread_time)


def figures(num_layers: int, repeats: int) -> Iterator[Figure]:
    trained = model(num_layers)
    copy = quantized_copy(trained, torch.device("cpu"))
    write_weights(copy, full_weights(trained))
    config = RolloutConfig(max_response_tokens=RESPONSE)
    floats, integers = (HfRollout(each, tokenizer(), config) for each in (trained, copy))
    ids = torch.randint(2, 8000, (8, 128))
    with torch.no_grad():
        logprobs = [m(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]) for m in (trained, copy)]
    source = torch.empty(num_bytes(floats) // 4)
    target = torch.empty_like(source)
    yield alone("parameters", "millions", sum(weight.numel() for weight in trained.parameters()) / 1e6)
    yield alone("weights in float32", "MB", num_bytes(floats) / 1e6)
    yield alone("weights in int8", "MB", num_bytes(integers) / 1e6)
    yield alone("mean distance of log-probabilities", "nats", float((logprobs[0] - logprobs[1]).abs().mean()))
    yield alone("standard deviation of log-probabilities", "nats", statistics.stdev(logprobs[0].flatten().tolist()))
    yield paired(
        "quantizing all weights, compared with a copy of as many bytes, CPU time",
        lambda: write_weights(copy, full_weights(trained)),
        lambda: target.copy_(source),
        repeats,
        clock=time.thread_time,
    )
    for rows in (16, 64):
        yield generation(floats, integers, rows, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = read_arguments(parser, layers=1, repeats=1)
    torch.set_num_threads(1)
    for figure in figures(arguments.layers, arguments.repeats):
        sys.stdout.write(json.dumps(figure) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
