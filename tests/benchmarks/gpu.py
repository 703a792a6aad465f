"""Checks and times training and generation on one GPU, without Ray and pytest. `python -m tests.benchmarks.gpu`

Prints one line per measurement, most valuable first. `--device cpu --tiny` tries out the program without a GPU.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, OptimizerConfig, RolloutConfig
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.train.engine import Denominators, TrainEngine
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.policy_model import PolicyModel, policy_logprobs
from tests.engines.losses import weighted_loss
from tests.engines.tables import table
from tests.engines.tiny import tokenizer

WARMUP, REPEATS = 2, 5


def build(tiny: bool) -> Qwen2ForCausalLM:
    """Returns a random Qwen2 of 0.5 billion parameters, or a tiny one."""
    torch.manual_seed(0)
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 32000}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 8 if tiny else 16, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    sizes = (small if tiny else large) | heads | {"eos_token_id": 1, "pad_token_id": 0}
    return Qwen2ForCausalLM(Qwen2Config.from_dict(sizes)).eval()


def loss(model: nn.Module, micro: MicroBatch, counts: Denominators):
    return weighted_loss(model(micro.input_ids, micro.tokens["response_mask"], pack=micro.pack)[0], micro, counts)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the median duration of a call, including the work that it queues on the device."""
    times = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[WARMUP:])[REPEATS // 2]


def check_logprobs(device: torch.device) -> str:
    """Compares float32 log-probabilities of the device with the CPU."""
    rows, values = table(16), []
    for where in (torch.device("cpu"), device):
        engine = TrainEngine(PolicyModel(build(tiny=True)), None, EngineConfig(), device=where)
        values.append(engine.evaluate(rows, lambda m, micro: policy_logprobs(m, micro, temperature=1.0)))
    error = ((values[1] - values[0]).norm() / values[0].norm()).item()
    return f"log-probabilities: relative error {error:.1e} against the CPU ({'ok' if error < 1e-3 else 'TOO LARGE'})"


def time_update(device: torch.device, tiny: bool, packing: str, offload: str = "none") -> str:
    """Times an optimizer step in bfloat16 over float32 weights."""
    rows = table(64, longest=12 if tiny else 1024)
    settings = {"packing": packing, "offload": offload, "compute_dtype": "bfloat16"}
    optimizer = OptimizerConfig(lr=1e-4)
    engine = TrainEngine(PolicyModel(build(tiny)), optimizer, EngineConfig.model_validate(settings), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    duration = seconds(lambda: engine.update(rows, loss), device)
    tokens = len(rows["tokens", "input_ids"])
    peak = f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB" if device.type == "cuda" else ""
    return f"update, packing {packing}, offload {offload}: {tokens / duration:.0f} tokens/s{peak}"


def time_generate(device: torch.device, tiny: bool) -> str:
    """Times generation with transformers in bfloat16."""
    num_tokens = 8 if tiny else 128
    model = build(tiny)
    nn.Module.to(model, device, torch.bfloat16)
    rollout = HfRollout(model, tokenizer(), RolloutConfig(max_response_tokens=num_tokens))
    prompts, samples = [[2 + i % 30] * 16 for i in range(64)], torch.zeros(64, dtype=torch.int64)
    generated = int(rollout.generate(prompts, torch.arange(64), samples, seed=0).lengths.sum())
    duration = seconds(lambda: rollout.generate(prompts, torch.arange(64), samples, seed=0), device)
    return f"generate, 64 sequences: {generated / duration:.0f} tokens/s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, tiny = torch.device(options.device), options.tiny
    cases: list[Callable[[], str]] = [
        lambda: check_logprobs(device),
        lambda: time_update(device, tiny, "auto"),
        lambda: time_update(device, tiny, "never"),
        lambda: time_generate(device, tiny),
        lambda: time_update(device, tiny, "auto", "optimizer"),
    ]
    for case in cases:
        try:
            print(case(), flush=True)  # noqa: T201 (output is the purpose)
        except Exception as error:  # noqa: BLE001 (one failure must not hide the other measurements)
            print(f"FAILED: {type(error).__name__}: {error}", flush=True)  # noqa: T201 (as above)


if __name__ == "__main__":
    main()
