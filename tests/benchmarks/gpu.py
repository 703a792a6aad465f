"""Checks and times training and generation on one GPU, without Ray, peft and pytest.

Usage: `python -m tests.benchmarks.gpu`. Prints one line per check and measurement, most valuable first, and exits with
1 if one fails. `--device cpu --tiny` runs the program without a GPU. So far, it has run on CPUs only.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, OptimizerConfig, RolloutConfig
from flowrl.engines.models.int8 import int8_product
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.train.engine import Denominators, TrainEngine
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.policy_model import PolicyModel, policy_logprobs
from tests.benchmarks.measure import read_arguments
from tests.engines.closeness import relative_error
from tests.engines.device_memory import allocated_bytes
from tests.engines.losses import weighted_loss
from tests.engines.tables import table
from tests.engines.tiny import qwen2, tokenizer

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


def require(name: str, error: float, limit: float) -> str:
    assert error <= limit, f"{name}: relative error {error:.1e}, at most {limit:.0e} is allowed"
    return f"{name}: relative error {error:.1e}, ok"


def logprobs(device: torch.device, **settings: str) -> torch.Tensor:
    """Returns log-probabilities of a tiny policy."""
    engine = TrainEngine(PolicyModel(build(tiny=True)), None, EngineConfig.model_validate(settings), device=device)
    return engine.evaluate(table(16), lambda m, micro: policy_logprobs(m, micro, temperature=1.0))


def check_logprobs(device: torch.device) -> str:
    """Compares float32 log-probabilities of the device with the CPU."""
    return require("log-probabilities", relative_error(logprobs(device), logprobs(torch.device("cpu"))), 1e-3)


def check_packing(device: torch.device) -> str:
    """Compares bfloat16 log-probabilities of packed rows with padded rows."""
    padded = logprobs(device, packing="never", compute_dtype="bfloat16")
    packed = logprobs(device, packing="always", compute_dtype="bfloat16")
    return require("packed rows", relative_error(packed, padded), 0.03)


def check_generate(device: torch.device) -> str:
    """Compares greedy tokens of a float64 model with the CPU."""
    prompts, ids, samples = [[2 + i % 30] * (1 + i) for i in range(16)], torch.arange(16), torch.zeros(16).long()
    requests = make_requests(prompts, ids, samples, seed=0, temperature=0.0)
    tokens = []
    for where in (device, torch.device("cpu")):
        engine = HfRollout(qwen2(torch.float64), tokenizer(), RolloutConfig(max_response_tokens=10), where)
        tokens.append([response.token_ids for response in engine.generate(requests)])
    assert tokens[0] == tokens[1], "greedy tokens differ from those of the CPU"
    return "greedy tokens: equal to those of the CPU"


def check_int8(device: torch.device) -> str:
    """Compares products of int8 matrices with the CPU."""
    for num_rows, inputs, outputs in [(1, 1, 1), (3, 30, 7), (17, 64, 33), (40, 3072, 96), (33, 1025, 40)]:
        left, right = torch.full((num_rows, inputs), 127).char(), torch.full((outputs, inputs), -127).char()
        product = int8_product(left.to(device), right.to(device)).cpu()
        assert torch.equal(product, int8_product(left, right)), f"the product of {num_rows} rows differs from the CPU"
    return "int8 products: equal to those of the CPU"


def check_offload(device: torch.device) -> str:
    """Checks that an offloaded engine leaves no weights or optimizer state on the device, and trains again."""
    optimizer, config = OptimizerConfig(lr=1e-4), EngineConfig(offload="idle")
    engine = TrainEngine(PolicyModel(build(tiny=True)), optimizer, config, device=device)
    allocated = []
    for _ in range(2):
        engine.update(table(9), loss)
        engine.offload()
        assert {parameter.device.type for parameter in engine.model.parameters()} == {"cpu"}
        allocated.append(allocated_bytes() if device.type == "cuda" else 0)
        engine.onload()
    assert allocated[0] == allocated[1] < 1024**2, f"bytes on the device while offloaded: {allocated}"
    return f"offload: {allocated[0]} bytes remain on the device"


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
    requests = make_requests(prompts, torch.arange(64), samples, seed=0)
    generated = sum(len(response.token_ids) for response in rollout.generate(requests))
    duration = seconds(lambda: rollout.generate(requests), device)
    return f"generate, 64 sequences: {generated / duration:.0f} tokens/s"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    options = read_arguments(parser, device="cpu", tiny=True)
    device, tiny = torch.device(options.device), options.tiny
    cases: list[Callable[[], str]] = [
        lambda: check_logprobs(device),
        lambda: check_packing(device),
        lambda: check_generate(device),
        lambda: check_offload(device),
        lambda: time_update(device, tiny, "auto"),
        lambda: time_generate(device, tiny),
        lambda: time_update(device, tiny, "never"),
        lambda: time_update(device, tiny, "auto", "optimizer"),
        lambda: check_int8(device),
    ]
    num_failed = 0
    for case in cases:
        try:
            print(case(), flush=True)  # noqa: T201 (output is the purpose)
        except Exception:  # noqa: BLE001 (reported here and in the exit code; the other cases must still run)
            num_failed += 1
            print(f"FAILED\n{traceback.format_exc()}", flush=True)  # noqa: T201 (as above)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
