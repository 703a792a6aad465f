"""Weight sync from an actor to a rollout in another process: `python -m tests.benchmarks.weight_transfer`.

Measurements alternate with the baselines: raw Ray that sends arrays of the same sizes, a copy of the same bytes, and
one call per parameter. If vLLM is installed, its updates are measured too.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl import Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, LoraConfig, ModelConfig, OptimizerConfig, RolloutConfig, TransferConfig
from flowrl.workers import Actor, Rollout
from tests.benchmarks.measure import Figure, alone, machine, paired, peak_growth, read_arguments
from tests.benchmarks.measure import table as table_of
from tests.benchmarks.vllm_updates import own_engine_ms, reload_ms
from tests.engines import tiny

SIZES: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "100M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12},
}
REPEATS = {"1M": 20, "100M": 7}
ONE_BUCKET_MB = 1e6
"""Bucket size that exceeds the size of every model."""


def save(folder: Path, size: str) -> ModelConfig:
    """Saves a randomly initialized model and the tests' tokenizer."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 256, **SIZES[size]}
    config = Qwen2Config(vocab_size=2048, tie_word_embeddings=True, **shape)
    tiny.save(Qwen2ForCausalLM(config), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return ModelConfig(path=folder)


@contextmanager
def opened(
    model: ModelConfig, engine: str, lora: LoraConfig | None = None
) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Opens an actor and a rollout in separate processes."""
    placement = Placement(device="cpu", pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    rollout = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": 8})
    dedicated = ("rollout",) if engine == "vllm" else ()
    with Cluster(placement, dedicated=dedicated, num_threads=1) as cluster:
        settings = ActorConfig(model=model, optimizer=OptimizerConfig(lr=1e-4), lora=lora)
        actor = cluster.group("actor", Actor, settings)
        replica = cluster.group("rollout", Rollout, rollout, model, seed=0)
        cluster.wait_for_calls()
        yield actor, replica


class Raw:
    """Ray actor that returns arrays of the same sizes, or copies arrays into its own."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.arrays = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}

    def send(self, names: list[str] | None = None) -> dict[str, np.ndarray]:
        return self.arrays if names is None else {name: self.arrays[name] for name in names}

    def receive(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            np.copyto(self.arrays[name], array)

    def copy_ms(self, repeats: int) -> float:
        """Returns the milliseconds of a copy of all weights into existing memory."""
        targets, times = {name: array.copy() for name, array in self.arrays.items()}, []
        for _ in range(repeats):
            start_s = time.perf_counter()
            for name, array in self.arrays.items():
                np.copyto(targets[name], array)
            times.append(1e3 * (time.perf_counter() - start_s))
        return statistics.median(times)


def sync_weights(
    actor: WorkerGroup, rollout: WorkerGroup, count: int, bucket_mb: float, *, wait_for_each: bool = False
) -> None:
    """Runs a weight sync as in a run, or waits after each bucket."""
    done = []
    buckets = [] if wait_for_each else [actor.weights.submit(i, bucket_mb) for i in range(count)]
    for bucket in range(count):
        weights = actor.weights.submit(bucket, bucket_mb) if wait_for_each else buckets[bucket]
        done.append(rollout.load_weights.submit(weights, 1, bucket, count))
        if wait_for_each:
            done[-1].get()
    for future in done:
        future.get()


def object_store(size: str, model: ModelConfig) -> list[Figure]:
    """Compares an update of an hf rollout with raw Ray, with smaller buckets, and with one call per parameter."""
    results, repeats = [], REPEATS[size]
    with opened(model, "hf") as (actor, rollout):
        arrays = actor.weights().get()
        shapes = {name: array.shape for name, array in arrays.items()}
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        del arrays
        one, other = (ray.remote(Raw).options(num_cpus=0).remote(shapes) for _ in range(2))

        def raw() -> None:
            ray.get(other.receive.remote(one.send.remote()))

        one_bucket = partial(sync_weights, actor, rollout, 1, ONE_BUCKET_MB)
        figure = paired(
            f"{size}: update through the object store ({megabytes:.0f} MB)", one_bucket, raw, repeats, 1 / 0.85
        )
        copy_ms: float = ray.get(one.copy_ms.remote(repeats))  # pyright: ignore[reportAssignmentType] (Ray's own types)
        results += [
            figure,
            alone(f"{size}: the same, GB/s", "GB/s", megabytes / figure["ours"]),
            alone(f"{size}: the same, relative to a copy of the bytes (`memcpy`)", "x", figure["ours"] / copy_ms),
        ]
        for share in (4, 16):
            bucket_mb = megabytes / share
            count = actor.num_buckets(bucket_mb).get()
            in_buckets = partial(sync_weights, actor, rollout, count, bucket_mb)
            results.append(
                paired(f"{size}: {count} buckets; raw is one bucket", in_buckets, one_bucket, max(3, repeats // 2))
            )
        each = partial(sync_weights, actor, rollout, len(shapes), 1e-6, wait_for_each=True)
        results.append(paired(f"{size}: one call per weight ({len(shapes)}); raw is one bucket", each, one_bucket, 3))
    return results


def adapter(size: str, model: ModelConfig, engine: str) -> list[Figure]:
    """Compares an update with only the adapter with one of all merged weights."""
    lora = LoraConfig(rank=16)
    with opened(model, engine, lora) as (actor, rollout):
        sent, merged = (
            sum(array.nbytes for array in arrays.get().values()) for arrays in (actor.adapter(), actor.weights())
        )

        def of_adapter() -> None:
            rollout.load_adapter.submit(actor.adapter.submit(), lora, TransferConfig().bucket_mb, 1).get()

        of_all = partial(sync_weights, actor, rollout, 1, ONE_BUCKET_MB)
        what = f"{size}: update of {engine} with an adapter ({sent / 1e6:.1f} MB); raw sends {merged / 1e6:.0f} MB"
        return [paired(what, of_adapter, of_all, REPEATS[size])]


def peaks(model: ModelConfig) -> list[Figure]:
    """Measures the memory of an update in addition to the two models, by bucket size."""
    results = []
    with opened(model, "hf") as (actor, rollout):
        for bucket_mb in (ONE_BUCKET_MB, 64, 16):
            count = actor.num_buckets(bucket_mb).get()
            (grown,) = actor.run(export_growth, count=count, bucket_mb=bucket_mb)
            what = "in one bucket" if count == 1 else f"in buckets of {bucket_mb:g} MB"
            results.append(
                alone(f"100M: growth of the actor's peak memory while it exports its weights {what}", "MB", grown / 1e6)
            )
        sync_weights(actor, rollout, 1, ONE_BUCKET_MB)
    return results


def export_growth(worker: Actor, count: int, bucket_mb: float) -> int:
    """Returns the memory growth of a process while it exports the buckets."""

    def export() -> None:
        for bucket in range(count):
            worker.weights(bucket, bucket_mb)

    return peak_growth(export)


def vllm(size: str, model: ModelConfig) -> list[Figure]:
    """Compares an update of vLLM with a copy of the same bytes, and measures the time inside vLLM."""
    repeats = REPEATS[size]
    with opened(model, "vllm") as (actor, rollout):
        arrays = actor.weights().get()
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        raw = ray.remote(Raw).options(num_cpus=0).remote({name: array.shape for name, array in arrays.items()})
        one_bucket = partial(sync_weights, actor, rollout, 1, ONE_BUCKET_MB)
        bound = 8.0 if size == "100M" else None
        figure = _compared_with_copy(f"{size}: update of vLLM ({megabytes:.0f} MB)", one_bucket, raw, repeats, bound)
        if size == "1M":
            figure["bound"] = 60.0
            figure.pop("ratio")
            figure.pop("raw")
        results = [figure, alone(f"{size}: the same, GB/s", "GB/s", megabytes / figure["ours"])]
        for share in (3, 6) if size == "100M" else ():
            count = actor.num_buckets(megabytes / share).get()
            in_buckets = partial(sync_weights, actor, rollout, count, megabytes / share)
            results.append(
                _compared_with_copy(f"{size}: update of vLLM in {count} buckets", in_buckets, raw, repeats, bound)
            )
        for what, times in (("flowrl's transfer engine", own_engine_ms), ("vLLM's reload_weights", reload_ms)):
            (milliseconds,) = rollout.run(times, weights=arrays, repeats=repeats)
            results.append(alone(f"{size}: inside vLLM, {what}", "ms", milliseconds))
    return results


def _compared_with_copy(what: str, update: Callable[[], Any], raw: Any, repeats: int, bound: float | None) -> Figure:
    """Alternates updates with copies. A copy is timed inside its process, without the call."""
    mine, copies = [], []
    for number in range(repeats + 2):
        start_s = time.perf_counter()
        update()
        update_ms = 1e3 * (time.perf_counter() - start_s)
        copy_ms = ray.get(raw.copy_ms.remote(3))
        if number >= 2:
            mine.append(update_ms)
            copies.append(copy_ms)
    ratio = statistics.median(a / b for a, b in zip(mine, copies, strict=True))
    figure = Figure(
        what=what,
        unit="ms",
        ours=round(statistics.median(mine), 2),
        raw=round(statistics.median(copies), 2),
        ratio=round(ratio, 2),
    )
    if bound is not None:
        figure["bound"] = bound
    return figure


def main() -> None:
    """Prints the figures. The memory of an update is measured with the largest of the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, sizes=["1M"])
    figures, before = [], machine()
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes:
            model = save(Path(folder) / size, size)
            figures += object_store(size, model)
            figures += adapter(size, model, "hf")
            if importlib.util.find_spec("vllm") is not None:
                figures += vllm(size, model)
                figures += adapter(size, model, "vllm")
        if "100M" in arguments.sizes:
            figures += peaks(model)
    if arguments.table:
        sys.stdout.write(
            table_of(figures) + "\n" + "\n".join(f"{name}: {value}" for name, value in before.items()) + "\n"
        )
    else:
        sys.stdout.write(json.dumps({"figures": figures, "machine": before}, indent=1) + "\n")


if __name__ == "__main__":
    main()
