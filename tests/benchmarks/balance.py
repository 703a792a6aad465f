"""Idle time of the faster of two ranks, with the rows of a call split by number and by tokens.

python -m tests.benchmarks.balance [--batches N] [--model 81k]

A call ends when its slowest rank ends. Row lengths are log-normal (median 33, sigma 1, at most 256 tokens). Each
rank's part runs in this process, one after the other, and its time is the CPU time, so that other programs on the
machine matter little. The model is a Qwen2 in float32, with one thread. The idle time is the
difference of the two ranks relative to the slower one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from flowrl import Batch, Cluster
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig
from flowrl.config.placement import SINGLE
from flowrl.data.batch.block import split_by_weight, split_evenly
from flowrl.workers import Actor
from tests.benchmarks.measure import machine, read_arguments
from tests.benchmarks.step import write_inputs

NUM_RANKS = 2


def batch_of(num_rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = (33 * torch.randn(num_rows, generator=generator).exp()).round().clamp(2, 256).long().tolist()
    ids_T, advantages_T = torch.randint(90, (sum(lengths),), generator=generator), torch.ones(sum(lengths))
    mask = [position > 0 for length in lengths for position in range(length)]
    tokens = {"input_ids": ids_T, "response_mask": mask, "advantages": advantages_T, "old_logprobs": -advantages_T}
    return Batch.from_columns(tokens=tokens, lengths=lengths)


def measure(actor: Any, method: str, num_rows: int, num_batches: int) -> dict[str, Any]:
    """Returns the medians over batches of the idle fraction, and of the ratio of the times of the slower ranks."""
    idle: dict[str, list[float]] = {"rows": [], "tokens": []}
    ratios = []
    for seed in range(num_batches):
        batch = batch_of(num_rows, seed)
        slowest = {}
        for balance in ("rows", "tokens") if seed % 2 else ("tokens", "rows"):
            if balance == "rows":
                parts = [list(range(*ends)) for ends in split_evenly(num_rows, NUM_RANKS)]
            else:
                parts = [rows.tolist() for rows in split_by_weight(batch.lengths(), NUM_RANKS)]
            seconds = []
            for rows in parts:
                part = batch.rows(rows)
                start_s = time.process_time()
                result = getattr(actor, method)(part)
                result.get("logprobs") if isinstance(result, Batch) else result.get()
                seconds.append(time.process_time() - start_s)
            slowest[balance] = max(seconds)
            idle[balance].append(1 - min(seconds) / max(seconds))
        ratios.append(slowest["tokens"] / slowest["rows"])
    medians = {f"idle, split by {name}": round(statistics.median(values), 3) for name, values in idle.items()}
    return {
        "method": method,
        "rows": num_rows,
        **medians,
        "time by tokens / by rows": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--model", choices=("81k", "2.9M"), default="2.9M")
    arguments = read_arguments(parser, batches=1, model="81k")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), arguments.model, 8)
        model = ModelConfig(path=Path(folder) / "policy")
        config = ActorConfig(model=model, optimizer=OptimizerConfig(lr=1e-5), temperature=1.0)
        with Cluster(SINGLE, backend="inline", num_threads=1) as cluster:
            actor = cluster.group("actor", Actor, config)
            actor.update(batch_of(8, 0)).get()
            figures = [
                measure(actor, method, num_rows, arguments.batches)
                for method in ("logprobs", "update")
                for num_rows in (16, 64)
            ]
    sys.stdout.write(json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
