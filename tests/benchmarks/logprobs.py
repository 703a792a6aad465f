"""Time and peak memory of log-probabilities from hidden states in tiles, compared with full logits.

python -m tests.benchmarks.logprobs [--repeats N] [--vocabulary 152000] [--table] [--compiled]

`--compiled` compares CPU times of compiled tiles (`engine.compile`) with those of plain ones instead.

Times are wall times of a forward and a backward pass; measurements of both sides alternate. CPU time is also printed,
because other programs on the machine affect it less. Peak memory is the growth of a new process during one such pass,
with gradients and without inputs.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from flowrl.algorithms import logprobs_and_entropy_from_hidden, logprobs_from_hidden
from tests.benchmarks.measure import MIB, Figure, alone, machine, paired, read_arguments, table

TOKENS, VOCABULARY = 4096, 32_000
TIME_BOUNDS = {128: 1.2, 1024: 1.5}
"""Hidden size -> largest ratio of times to the naive form."""

MEMORY_BOUND = 0.3


def passes(size: int, vocabulary: int) -> dict[str, Callable[[], object]]:
    """Returns forward and backward passes on the same inputs, by name."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, TOKENS, size), generator=generator).requires_grad_()
    weight = (torch.randn((vocabulary, size), generator=generator) / size**0.5).requires_grad_()
    tokens = torch.randint(vocabulary, (1, TOKENS), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def naive_logprobs() -> Tensor:
        logits = torch.nn.functional.linear(hidden[:, :-1], weight)
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])

    return {
        "ours": lambda: torch.autograd.grad(logprobs_from_hidden(hidden, weight, tokens, mask).sum(), (hidden, weight)),
        "naive": lambda: torch.autograd.grad(naive_logprobs().sum(), (hidden, weight)),
    }


def compiled_figures(size: int, vocabulary: int, repeats: int) -> list[Figure]:
    """Returns the CPU times of compiled tiles next to those of plain ones, with and without entropy."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn((1, TOKENS, size), generator=generator).to(dtype).requires_grad_()
        weight = (torch.randn((vocabulary, size), generator=generator) / size**0.5).to(dtype).requires_grad_()
        inputs = hidden, weight, torch.randint(vocabulary, (1, TOKENS)), torch.ones(1, TOKENS, dtype=torch.bool)
        for function in (logprobs_from_hidden, logprobs_and_entropy_from_hidden):

            def run(compiled: bool, function: Callable[..., Any] = function, inputs: Any = inputs) -> None:
                results = function(*inputs, num_targets=TOKENS - 1, compiled=compiled)
                total = sum((values.sum() for values in results), start=torch.tensor(0.0))
                torch.autograd.grad(total, inputs[:2])

            what = f"{function.__name__}, {str(dtype).removeprefix('torch.')}, hidden {size}: compiled / plain"
            results.append(paired(what, partial(run, True), partial(run, False), repeats, clock=time.process_time))
    return results


def peak_mib(name: str, size: int, vocabulary: int) -> float:
    """Returns the memory growth of a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.logprobs", "--peak", name, str(size), str(vocabulary)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def grown_mib(name: str, size: int, vocabulary: int) -> float:
    """Returns the growth of this process's peak memory by one pass."""
    run = passes(size, vocabulary)[name]
    before = psutil.Process().memory_info().rss
    run()
    # Not ru_maxrss, which a process inherits from its parent.
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return (int(peak_kib) * 1024 - before) / MIB


def figures(size: int, vocabulary: int, repeats: int, bounded: bool) -> list[Figure]:
    """Measures time and memory for one hidden size."""
    what = f"{TOKENS} tokens, vocabulary {vocabulary}, hidden {size}"
    run, bound = passes(size, vocabulary), TIME_BOUNDS[size] if bounded else None
    results = [paired(f"{what}: time", run["ours"], run["naive"], repeats, bound)]
    cpu = [[cpu_ms(run[name]) for name in ("ours", "naive")] for _ in range(3)]
    results.append(
        alone(f"{what}: CPU time, ratio to naive", "x", statistics.median(ours / naive for ours, naive in cpu))
    )
    ours, naive = (peak_mib(name, size, vocabulary) for name in ("ours", "naive"))
    results.append(alone(f"{what}: peak memory", "MiB", ours))
    results.append(alone(f"{what}: peak memory, naive", "MiB", naive))
    results.append(alone(f"{what}: peak memory, ratio to naive", "x", ours / naive, MEMORY_BOUND if bounded else None))
    return results


def cpu_ms(call: Callable[[], object]) -> float:
    """Returns the CPU milliseconds of all threads of this process."""
    start_s = time.process_time()
    call()
    return (time.process_time() - start_s) * 1e3


def main() -> None:
    """Measures both hidden sizes. The bounds apply to the vocabulary of 32,000."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(TIME_BOUNDS), choices=list(TIME_BOUNDS))
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--peak", nargs=3, metavar=("NAME", "HIDDEN", "VOCABULARY"), help="one pass, its memory")
    arguments = read_arguments(parser, repeats=1, hidden=[128], vocabulary=2000)
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        name, size, vocabulary = arguments.peak
        sys.stdout.write(f"{grown_mib(name, int(size), int(vocabulary))}\n")
        return
    ran_on, bounded, results = machine(), arguments.vocabulary == VOCABULARY, []
    for size in arguments.hidden:
        if arguments.compiled:
            results += compiled_figures(size, arguments.vocabulary, arguments.repeats)
        else:
            results += figures(size, arguments.vocabulary, arguments.repeats, bounded)
    text = table(results).replace("raw Ray", "naive") if arguments.table else None
    sys.stdout.write(f"{text or json.dumps({'machine': ran_on, 'figures': results}, indent=2)}\n")


if __name__ == "__main__":
    main()
