"""Ratios of the CPU times of flowrl and of a baseline in the same run, for `tests.benchmarks.regress`.

Each function returns ratios by their names, given a number of rounds.
"""

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from flowrl import Batch, Cluster, Placement
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from flowrl.config.placement import SINGLE
from flowrl.controller.backends.local_ray import RAY_SETTINGS
from flowrl.data.batch.tensordicts import lengths
from flowrl.workers import Actor, Rollout
from recipes.quickstart.prepare import prepare
from tests.benchmarks import bench_rollouts, data, generation, packing, step, weight_transfer
from tests.benchmarks.bench_workers import COLUMNS, RANKS, Bench, Raw
from tests.benchmarks.measure import paired

Values = Mapping[str, float]


def step_ratios(rounds: int) -> Values:
    """Compares steps with the same passes in plain torch, and steps on Ray with those of the inline backend."""
    lines = [line for case in step.cases(["plain", "ray"], ["81k"]) for line in step.measure(case, rounds)]
    return {f"step {line.part} / {line.baseline}": line.cpu_ratio for line in lines}


def dispatch_ratios(rounds: int) -> Values:
    """Compares calls of four ranks with raw Ray, by the CPU time of the driver."""
    os.environ |= RAY_SETTINGS
    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "log_to_driver": False}
    ray.init("local", num_cpus=2 * RANKS, logging_level=logging.ERROR, **options)
    columns = {name: np.ones(8 * RANKS, dtype=np.float32) for name in COLUMNS}
    parts = [{name: column[8 * i : 8 * i + 8] for name, column in columns.items()} for i in range(RANKS)]
    placement = Placement(device="cpu", pools={"main": [RANKS]}, roles={"bench": "main"})
    with Cluster(placement, num_threads=1) as cluster:
        group, actors = cluster.group("bench", Bench), [Raw.remote() for _ in range(RANKS)]
        sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "without arguments": (group.nothing, lambda: ray.get([actor.nothing.remote() for actor in actors])),
            "with 8 rows": (
                lambda: group.echo(Batch.from_columns(tokens=columns, lengths=[4] * 8)).payload(),
                lambda: ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)]),
            ),
        }
        figures = {
            f"call {name} / raw Ray": paired(name, ours, raw, 60 * rounds, clock=time.process_time)
            for name, (ours, raw) in sides.items()
        }
    ray.shutdown()
    return {name: figure["ratio"] for name, figure in figures.items() if "ratio" in figure}


def generation_ratios(rounds: int) -> Values:
    """Compares engine hf with `model.generate` of transformers, and `flowrl generate` with the engine."""
    num_rows, limit = 64, 128
    with tempfile.TemporaryDirectory() as name, Cluster(SINGLE, backend="inline", num_threads=1) as cluster:
        model, task = Path(name) / "model", Path(name) / "task"
        bench_rollouts.save_model("1M", model)
        config = RolloutConfig(max_response_tokens=limit, max_num_seqs=num_rows)
        group: Any = cluster.group("rollout", Rollout, config, ModelConfig(path=model), seed=0)
        of_engine = []
        for number in range(rounds + 1):
            prompts = bench_rollouts.prompts_of([limit // 2] * num_rows, number)
            ours = group.run(bench_rollouts.engine_generate, prompts, number, rank_zero=True)
            bare = group.run(bench_rollouts.transformers_generate, prompts, num_rows, limit, rank_zero=True)
            of_engine.append(ours.cpu_s / bare.cpu_s)
        prepare(task, seed=0)
        of_command = [engine / command for engine, command in generation.measure(task, 32, 256, 2, rounds + 1)]
    return {
        "engine hf / transformers": statistics.median(of_engine[1:]),
        "flowrl generate / engine hf": statistics.median(of_command[1:]),
    }


def transfer_ratios(rounds: int) -> Values:
    """Compares a weight sync within one process with a copy of the bytes."""
    with tempfile.TemporaryDirectory() as name, Cluster(SINGLE, backend="inline", num_threads=1) as cluster:
        model = weight_transfer.save(Path(name), "100M")
        settings = ActorConfig(model=model, optimizer=OptimizerConfig(lr=1e-4))
        actor: Any = cluster.group("actor", Actor, settings)
        rollout: Any = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=8), model, seed=0)
        weights = actor.weights().get()
        copies = {name: array.copy() for name, array in weights.items()}

        def copy() -> None:
            for name, array in weights.items():
                np.copyto(copies[name], array)

        sync = partial(weight_transfer.sync_weights, actor, rollout, 1, weight_transfer.ONE_BUCKET_MB)
        figure = paired("weight sync", sync, copy, 3 * rounds, clock=time.process_time)
    return {"weight sync / copy of the bytes": figure.get("ratio", 0.0)}


def preparation_ratios(rounds: int) -> Values:
    """Compares `flowrl data prepare` with a loop of `apply_chat_template`."""
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer, rows = data.save_tokenizer(folder / "tokenizer"), data.write_rows(folder / "rows.jsonl", 10_000)
        for number in range(rounds):
            loop = data.on_one_core(data.baseline, rows, tokenizer, time.process_time)
            ours = data.on_one_core(data.prepared, rows, tokenizer, folder / f"{number}", time.process_time)
            ratios.append(loop / ours)
    return {"flowrl data prepare / loop": statistics.median(ratios)}


def packing_ratios(rounds: int) -> Values:
    """Compares an optimizer step of packed rows of different lengths with padded rows of one length."""
    torch.set_num_threads(1)
    packed, padded = packing.Stepper(128, "always"), packing.Stepper(128, "never")
    uneven = packing.rows_of(packing.long_tailed(64))
    even = packing.rows_of(torch.full((64,), int(lengths(uneven).sum()) // 64))
    sides = (lambda: packed.step(uneven), lambda: padded.step(even))
    figure = paired("packing", *sides, 2 * rounds, clock=time.process_time)
    return {"step with packed rows / rows of one length": figure.get("ratio", 0.0)}
