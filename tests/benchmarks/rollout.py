"""Tokens per second of both rollout engines, compared with the bare engines, and the cost of a decode step.

python -m tests.benchmarks.rollout [--sizes 1M 26M] [--engines hf vllm] [--repeats N] [--table]

flowrl and the baseline have the same prompts, the same response lengths and one thread per process. The baseline of
`hf` is `model.generate` of transformers in the same process. The baseline of `vllm` is `LLM.generate` in another
process, with the same settings. The order of the measurements rotates, and each measurement has new prompts. Ratios are
medians over the rounds. "call" is `group.generate` through Ray, which also builds the TensorDict and decodes text. The
benchmark takes minutes. The engine `vllm` requires the extra `vllm`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.workers import Rollout
from tests.benchmarks.bench_rollouts import (
    SIZES,
    BareLlm,
    Measurement,
    Prompts,
    decode_steps,
    engine_generate,
    llm_generate,
    processor_seconds,
    prompts_of,
    save_model,
    transformers_generate,
)
from tests.benchmarks.measure import machine, print_lines, read_arguments

ROWS = {"1M": 64, "26M": 32}
"""Model size -> number of rows that an engine generates concurrently. A long-tailed call has twice as many rows."""

LIMIT = 256
EQUAL, LONG_TAILED = "equal", "long-tailed"
"""Forms of the response lengths."""

BOUND = 0.9
"""Smallest ratio of tokens per second to those of the baseline."""

STEP_BOUND = 1.5
STEP_ROWS = {"1M": (64, 256), "26M": (64,)}
STEP_LENGTH, STEPS = 64, 32

Sides = dict[str, Callable[[Prompts, int], Measurement]]


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    unit: str
    ours: float
    bare: float
    ratio: float
    cpu_ratio: float
    """Ratio of CPU times, which other programs on the machine hardly affect."""
    bound: float | None


def lengths(shape: str, rows: int, seed: int) -> list[int]:
    """Returns response lengths: constant, or log-normal with a truncated tail."""
    if shape == EQUAL:
        return [LIMIT // 2] * rows
    drawn = torch.empty(2 * rows).log_normal_(3.5, 1.0, generator=torch.Generator().manual_seed(seed))
    return drawn.round().clamp(1, LIMIT).int().tolist()


@contextmanager
def opened(engine: str, folder: Path, rows: int) -> Iterator[tuple[WorkerGroup, Sides]]:
    """Opens a rollout and its baseline, and yields the group and the timed functions."""
    bare = {"bare": "bare"} if engine == "vllm" else {}
    roles = {"rollout": "main", **bare}
    placement = Placement(device="cpu", pools={name: [1] for name in ("main", *bare)}, roles=roles)
    config = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": LIMIT, "max_num_seqs": rows})
    with Cluster(placement, dedicated=tuple(roles) if bare else (), num_threads=1) as cluster:
        group = cluster.group("rollout", Rollout, config, ModelConfig(path=folder), seed=0)
        if bare:
            llm = cluster.group("bare", BareLlm, folder, rows)
            others: Sides = {
                "bare": lambda prompts, _: llm.run(llm_generate, prompts, LIMIT, None, rank_zero=True),
                "bare, seeded": lambda prompts, seed: llm.run(llm_generate, prompts, LIMIT, seed, rank_zero=True),
            }
        else:
            others = {"bare": lambda prompts, _: group.run(transformers_generate, prompts, rows, LIMIT, rank_zero=True)}
        yield (
            group,
            {
                "engine": lambda p, seed: group.run(engine_generate, p, seed, rank_zero=True),
                "call": _call(group),
                **others,
            },
        )


def _call(group: WorkerGroup) -> Callable[[Prompts, int], Measurement]:
    def cpu_s() -> float:
        return group.run(processor_seconds, rank_zero=True) + time.process_time()

    def run(prompts: Prompts, seed: int) -> Measurement:
        rows = [{"prompt_ids": ids, "prompt_id": seed * len(prompts) + i, "sample": 0} for i, ids in enumerate(prompts)]
        start_cpu_s, start_s = cpu_s(), time.perf_counter()
        mask = group.generate(Batch.from_rows(rows)).get("response_mask")
        seconds = time.perf_counter() - start_s
        return Measurement(int(mask.sum()), seconds, cpu_s() - start_cpu_s)

    return run


def run_rounds(sides: Sides, shape: str, rows: int, repeats: int) -> list[dict[str, Measurement]]:
    """Returns the measurements of each side per round. The first round is a warm-up."""
    rounds, names = [], list(sides)
    for number in range(repeats + 1):
        first = number % len(names)
        measurements = {}
        for index, name in enumerate((*names[first:], *names[:first])):
            seed = number * len(names) + index
            # New prompts for each side, so that the prefix cache has no hits.
            measurements[name] = sides[name](prompts_of(lengths(shape, rows, number), seed), seed)
        assert len({side.tokens for side in measurements.values()}) == 1, measurements
        rounds.append(measurements)
    return rounds[1:]


def throughput(what: str, rounds: list[dict[str, Measurement]], name: str, baseline: str, bound: float | None) -> Line:
    def rate(side: str) -> float:
        return statistics.median(each[side].tokens / each[side].seconds for each in rounds)

    ratio = statistics.median(each[baseline].seconds / each[name].seconds for each in rounds)
    cpu = statistics.median(each[baseline].cpu_s / each[name].cpu_s for each in rounds)
    return Line(what, "tokens/s", rate(name), rate(baseline), ratio, cpu, bound)


def steps(group: WorkerGroup, what: str, rows: int, repeats: int) -> Line:
    """Compares a decode step of the sampler with the faster of two bare forward passes."""
    rounds = [group.run(decode_steps, rows, STEP_LENGTH, STEPS, rank_zero=True) for _ in range(repeats + 1)][1:]
    ms = {name: statistics.median(each[name].seconds for each in rounds) / STEPS * 1e3 for name in rounds[0]}
    best = min(("DynamicCache", "StaticCache"), key=lambda name: ms[name])
    ratio = statistics.median(each["ours"].seconds / each[best].seconds for each in rounds)
    cpu = statistics.median(each["ours"].cpu_s / each[best].cpu_s for each in rounds)
    return Line(f"{what}: decode step of {rows} rows, {best}", "ms", ms["ours"], ms[best], ratio, cpu, STEP_BOUND)


def figures(size: str, engines: Sequence[str], shapes: Sequence[str], repeats: int) -> Iterator[Line]:
    """Yields all rows of a model as they are measured, with decode steps if a shape is long-tailed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(size, folder)
        for engine in engines:
            with opened(engine, folder, ROWS[size]) as (group, sides):
                for shape in shapes:
                    rounds = run_rounds(sides, shape, ROWS[size], repeats)
                    what = f"{engine}, {size}, {shape}"
                    yield throughput(what, rounds, "engine", "bare", BOUND)
                    if "bare, seeded" in sides:
                        yield throughput(f"{what}, per-request seeds", rounds, "engine", "bare, seeded", None)
                    yield throughput(f"{what}, call", rounds, "call", "bare", None)
                if engine == "hf" and LONG_TAILED in shapes:
                    yield from (steps(group, f"{engine}, {size}", rows, repeats) for rows in STEP_ROWS[size])


HEAD = "| what | ours | bare | ratio | CPU-time ratio | bound |\n|---|---|---|---|---|---|\n"


def row_of(line: Line) -> str:
    """Returns a row of the Markdown table."""
    bound = "" if line.bound is None else f"{line.bound:g}"
    mine, bare = (f"{n:,.0f}" if line.unit == "tokens/s" else f"{n:.2f} {line.unit}" for n in (line.ours, line.bare))
    return f"| {line.what} | {mine} | {bare} | {line.ratio:.2f} | {line.cpu_ratio:.2f} | {bound} |\n"


def main() -> None:
    """Prints the figures. The bound is the smallest ratio of a throughput, and the largest ratio of a decode step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"], choices=["hf", "vllm"])
    parser.add_argument("--shapes", nargs="+", default=[EQUAL, LONG_TAILED], choices=[EQUAL, LONG_TAILED])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, sizes=["1M"], engines=["hf"], shapes=[EQUAL], repeats=1)
    ran_on = machine() | {"transformers": version("transformers")}
    lines = (
        line
        for size in arguments.sizes
        for line in figures(size, arguments.engines, arguments.shapes, arguments.repeats)
    )
    print_lines(lines, ran_on, HEAD, row_of, is_table=arguments.table)


if __name__ == "__main__":
    main()
