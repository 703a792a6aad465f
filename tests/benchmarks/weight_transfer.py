"""Weight sync from an actor to a rollout in another process: `python -m tests.benchmarks.weight_transfer [--table]`.

Each size is measured in turn with raw Ray moving arrays of the same sizes, with a copy of the same bytes, and with the
form in which a call moves each parameter. Where vLLM is installed its updates are measured too.
"""

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
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from flowrl.workers import Actor, Rollout
from tests.benchmarks.measure import Figure, alone, machine, paired, peak_growth
from tests.benchmarks.measure import table as table_of
from tests.benchmarks.vllm_updates import own_engine_ms, reload_ms
from tests.engines import tiny

SIZES: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "100M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12},
}
REPEATS = {"1M": 20, "100M": 7}
WHOLE_MB = 1e6
"""A part that holds any of them."""


def save(folder: Path, size: str) -> ModelConfig:
    """Saves an untrained model of a size, with the tests' tokenizer."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 256, **SIZES[size]}
    config = Qwen2Config(vocab_size=2048, tie_word_embeddings=True, **shape)
    tiny.save(Qwen2ForCausalLM(config), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return ModelConfig(path=folder)


@contextmanager
def opened(model: ModelConfig, engine: str) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Opens an actor and a rollout in separate processes."""
    placement = Placement(device="cpu", pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    rollout = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": 8})
    apart = ("rollout",) if engine == "vllm" else ()
    with Cluster(placement, dedicated=apart, num_threads=1) as cluster:
        settings = ActorConfig(model=model, optimizer=OptimizerConfig(lr=1e-4))
        actor = cluster.group("actor", Actor, settings)
        made = cluster.group("rollout", Rollout, rollout, model, seed=0)
        cluster.wait_for_calls()
        yield actor, made


class Raw:
    """Ray actor that returns arrays of the same sizes and copies them into existing ones."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.held = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}

    def give(self, names: list[str] | None = None) -> dict[str, np.ndarray]:
        return self.held if names is None else {name: self.held[name] for name in names}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            np.copyto(self.held[name], array)

    def copy_ms(self, repeats: int) -> float:
        """Returns the milliseconds of a copy of all weights into existing memory."""
        targets, times = {name: array.copy() for name, array in self.held.items()}, []
        for _ in range(repeats):
            start_s = time.perf_counter()
            for name, array in self.held.items():
                np.copyto(targets[name], array)
            times.append(1e3 * (time.perf_counter() - start_s))
        return statistics.median(times)


def publish(
    actor: WorkerGroup, rollout: WorkerGroup, count: int, bucket_mb: float, *, wait_for_each: bool = False
) -> None:
    """Runs a weight sync as in a run, or waits after each bucket."""
    done = []
    parts = [] if wait_for_each else [actor.weights.submit(i, bucket_mb) for i in range(count)]
    for bucket in range(count):
        weights = actor.weights.submit(bucket, bucket_mb) if wait_for_each else parts[bucket]
        done.append(rollout.load_weights.submit(weights, 1, bucket, count))
        if wait_for_each:
            done[-1].get()
    for future in done:
        future.get()


def object_store(size: str, model: ModelConfig) -> list[Figure]:
    """Measures an update of an hf rollout, compared with raw Ray; its buckets; one call per parameter."""
    found, repeats = [], REPEATS[size]
    with opened(model, "hf") as (actor, rollout):
        arrays = actor.weights().get()
        shapes = {name: array.shape for name, array in arrays.items()}
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        del arrays
        one, other = (ray.remote(Raw).options(num_cpus=0).remote(shapes) for _ in range(2))

        def raw() -> None:
            ray.get(other.take.remote(one.give.remote()))

        whole = partial(publish, actor, rollout, 1, WHOLE_MB)
        figure = paired(f"{size}: update through the object store ({megabytes:.0f} MB)", whole, raw, repeats, 1 / 0.85)
        copy_ms: float = ray.get(one.copy_ms.remote(repeats))  # pyright: ignore[reportAssignmentType] (Ray's own types)
        found += [
            figure,
            alone(f"{size}: the same, GB/s", "GB/s", megabytes / figure["ours"]),
            alone(f"{size}: the same, in copies of the bytes (`memcpy`)", "x", figure["ours"] / copy_ms),
        ]
        for share in (4, 16):
            bucket_mb = megabytes / share
            count = actor.num_buckets(bucket_mb).get()
            parts = partial(publish, actor, rollout, count, bucket_mb)
            found.append(paired(f"{size}: in {count} parts, raw is one", parts, whole, max(3, repeats // 2)))
        each = partial(publish, actor, rollout, len(shapes), 1e-6, wait_for_each=True)
        found.append(paired(f"{size}: a call for each of {len(shapes)} weights, raw is one part", each, whole, 3))
    return found


def peaks(model: ModelConfig) -> list[Figure]:
    """Measures the memory of an update in addition to the two models, by bucket size."""
    found = []
    with opened(model, "hf") as (actor, rollout):
        for bucket_mb in (WHOLE_MB, 64, 16):
            count = actor.num_buckets(bucket_mb).get()
            (grown,) = actor.run(gives, count=count, bucket_mb=bucket_mb)
            what = "all at once" if count == 1 else f"in buckets of {bucket_mb:g} MB"
            found.append(alone(f"100M: actor's peak growth while it gives its weights {what}", "MB", grown / 1e6))
        publish(actor, rollout, 1, WHOLE_MB)
    return found


def gives(worker: Actor, count: int, bucket_mb: float) -> int:
    """Returns the memory growth of a process while it exports the buckets."""

    def make() -> None:
        for bucket in range(count):
            worker.weights(bucket, bucket_mb)

    return peak_growth(make)


def vllm(size: str, model: ModelConfig) -> list[Figure]:
    """Measures an update of vLLM, compared with a copy of the same bytes, and the share of vLLM."""
    repeats = REPEATS[size]
    with opened(model, "vllm") as (actor, rollout):
        arrays = actor.weights().get()
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        raw = ray.remote(Raw).options(num_cpus=0).remote({name: array.shape for name, array in arrays.items()})
        whole = partial(publish, actor, rollout, 1, WHOLE_MB)
        bound = 8.0 if size == "100M" else None
        figure = _beside_copy(f"{size}: update of vLLM ({megabytes:.0f} MB)", whole, raw, repeats, bound)
        if size == "1M":
            figure["bound"] = 60.0
            figure.pop("ratio")
            figure.pop("raw")
        found = [figure, alone(f"{size}: the same, GB/s", "GB/s", megabytes / figure["ours"])]
        for share in (3, 6) if size == "100M" else ():
            count = actor.num_buckets(megabytes / share).get()
            parts = partial(publish, actor, rollout, count, megabytes / share)
            found.append(_beside_copy(f"{size}: update of vLLM in {count} parts", parts, raw, repeats, bound))
        for what, times in (("own engine", own_engine_ms), ("vLLM's reload_weights", reload_ms)):
            (milliseconds,) = rollout.run(times, weights=arrays, repeats=repeats)
            found.append(alone(f"{size}: inside vLLM, {what}", "ms", milliseconds))
    return found


def _beside_copy(what: str, ours: Callable[[], Any], raw: Any, repeats: int, bound: float | None) -> Figure:
    """Measures medians in turn; the copy is timed inside its process, without the call."""
    mine, copies = [], []
    for number in range(repeats + 2):
        start_s = time.perf_counter()
        ours()
        passed_ms = 1e3 * (time.perf_counter() - start_s)
        copied_ms = ray.get(raw.copy_ms.remote(3))
        if number >= 2:
            mine.append(passed_ms)
            copies.append(copied_ms)
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


def main(arguments: list[str]) -> None:
    figures, before = [], machine()
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            model = save(Path(folder) / size, size)
            figures += object_store(size, model)
            if importlib.util.find_spec("vllm") is not None:
                figures += vllm(size, model)
        figures += peaks(model)
    if "--table" in arguments:
        sys.stdout.write(
            table_of(figures) + "\n" + "\n".join(f"{name}: {value}" for name, value in before.items()) + "\n"
        )
    else:
        sys.stdout.write(json.dumps({"figures": figures, "machine": before}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
