"""Throughput of `flowrl generate` next to that of the engine alone.

    python -m tests.benchmarks.generation [--prompts 256] [--samples 2] [--repeats 5] [--threads 1]

Both generate the same tokens with engine hf and the same weights. The command also selects requests, decodes text, and
writes each row to a file that it could resume. The time does not include loading the model. The ratio is that of CPU
seconds, because other programs use the machine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.inference.bulk_generation import generate_rows
from flowrl.inference.model_source import resolve_model
from flowrl.inference.prompt_file import PromptRow, read_prompt_rows, tokenize_rows
from flowrl.inference.response_file import ResumableFile
from flowrl.inference.text_generator import SamplingSettings, TextGenerator
from recipes.quickstart.prepare import prepare
from tests.benchmarks.measure import machine, read_arguments

_TOKENS = (6, 32)
"""Maximum numbers of tokens of a response."""


def engine_seconds(generator: TextGenerator, prompts: list[PromptRow], samples: int) -> tuple[float, int]:
    """Returns the CPU seconds and the tokens of one call of the engine."""
    rows = [(index, sample) for index in range(len(prompts)) for sample in range(samples)]
    ids, numbers = [prompts[index].token_ids for index, _ in rows], torch.tensor(rows)
    begun_s = time.process_time()
    responses = generator._engine.generate(make_requests(ids, numbers[:, 0], numbers[:, 1], seed=0))
    return time.process_time() - begun_s, sum(len(response.token_ids) for response in responses)


def command_seconds(generator: TextGenerator, prompts: list[PromptRow], samples: int) -> tuple[float, int]:
    """Returns the CPU seconds and the tokens of the work of the command after the start of the engine."""
    num_tokens = 0

    def report(progress) -> None:
        nonlocal num_tokens
        num_tokens += progress.num_tokens

    with tempfile.TemporaryDirectory() as folder:
        begun_s = time.process_time()
        output = ResumableFile(Path(folder) / "out.jsonl", {})
        generate_rows(generator, prompts, output, samples=samples, report=report)
        output.close(is_complete=True)
        return time.process_time() - begun_s, num_tokens


def measure(
    task: Path, max_tokens: int, num_prompts: int, samples: int, repeats: int, threads: int = 1
) -> list[tuple[float, float]]:
    """Returns the tokens per CPU second of the engine and of the command, per repeat.

    Args:
        task: the folder that `recipes.quickstart.prepare` has written.
        max_tokens: largest number of tokens of a response.
        num_prompts, samples: number of prompts, and of responses to each.
        repeats: number of measurements.
        threads: number of threads of torch.
    """
    rows = read_prompt_rows(str(task / "train.jsonl"), sys.stdin.buffer)[:num_prompts]
    generator = TextGenerator(resolve_model(str(task / "model")), SamplingSettings(max_tokens=max_tokens))
    torch.set_num_threads(threads)  # the generator has set the usable CPUs
    prompts = tokenize_rows(rows, generator.chat, max_length=generator.max_length, max_tokens=max_tokens, is_raw=False)
    speeds = []
    for _ in range(repeats):
        (engine_s, tokens), (command_s, same) = (
            seconds(generator, prompts, samples) for seconds in (engine_seconds, command_seconds)
        )
        assert tokens == same
        speeds.append((tokens / engine_s, tokens / command_s))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = read_arguments(parser, prompts=8, samples=1, repeats=1)
    sys.stdout.write(f"{machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        prepare(folder, seed=0)
        for max_tokens in _TOKENS:
            speeds = measure(
                folder, max_tokens, arguments.prompts, arguments.samples, arguments.repeats, arguments.threads
            )
            ratios = [command / engine for engine, command in speeds]
            engine, command = (statistics.median(values) for values in zip(*speeds, strict=True))
            sys.stdout.write(
                f"{max_tokens} tokens: engine {engine:,.0f} tokens per CPU second, command {command:,.0f}, "
                f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})\n"
            )


if __name__ == "__main__":
    main()
