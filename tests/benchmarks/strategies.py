"""Costs of each parallelism: time of an optimizer step, peak memory per rank, and bytes between ranks.

python -m tests.benchmarks.strategies [--repeats N] [--table]

The same rows, the same model, one thread per process. Times are of two processes that hold an engine of every case
and run them in turn, each round beginning with another; in those of one process the other waits. Ratios to `single` are
the median of the rounds', of the time that passed and of the processor time of a rank, which waiting for a core does
not lengthen. Memory is what a fresh process grows by, at its peak, while it reads the model and takes two steps, once a
small model has loaded all code. Bytes are those that a rank receives over its sockets in a step, as the kernel counts
them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import distributed
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.workers.policy_model import PolicyModel
from tests.benchmarks.measure import MIB, machine, peak_growth, received_bytes
from tests.benchmarks.packing import imitation, rows_of
from tests.engines.tables import take_rows

RANKS = 2
ROWS, TOKENS = 16, 128
BUDGET = ROWS * TOKENS // RANKS
"""Tokens per rank and pass: one process takes as many passes as there are ranks."""

VOCABULARY = 1024
SIZES = {"large": (384, 4), "small": (64, 2)}
"""Width and layers of the model that is measured, and of one that only loads code."""


@dataclass(frozen=True)
class Case:
    """A parallelism of the model."""

    ranks: int = 1
    engine: Mapping[str, object] = field(default_factory=dict)
    tp: int = 1
    sp: int = 1
    lora: LoraConfig | None = None
    dtype: str = "float32"


LORA = LoraConfig(rank=16)
CASES = {
    "single": Case(),
    "ddp": Case(RANKS, {"strategy": "ddp"}),
    "fsdp": Case(RANKS, {"strategy": "fsdp"}),
    "fsdp, reshard_after_forward: false": Case(RANKS, {"strategy": "fsdp", "reshard_after_forward": False}),
    "tp": Case(RANKS, tp=RANKS),
    "tp, sequence_parallel_norms: true": Case(RANKS, {"sequence_parallel_norms": True}, tp=RANKS),
    "sp": Case(RANKS, {"strategy": "ddp"}, sp=RANKS),
    "single, gradient_checkpointing": Case(engine={"gradient_checkpointing": True}),
    "single, LoRA": Case(lora=LORA),
    "fsdp, LoRA": Case(RANKS, {"strategy": "fsdp"}, lora=LORA),
    "tp, LoRA": Case(RANKS, tp=RANKS, lora=LORA),
    "single, compute_dtype: bfloat16": Case(engine={"compute_dtype": "bfloat16"}),
    "single, compute_dtype: float16": Case(engine={"compute_dtype": "float16"}),
    "single, dtype: bfloat16": Case(dtype="bfloat16"),
}


@dataclass(frozen=True)
class Found:
    """Measurements of one case."""

    what: str
    processes: int
    ms: float
    """Of one optimizer step, the median."""
    of_single: float
    cpu_of_single: float
    """Of the processor time of the first rank, all its threads."""
    peak_mib: float
    """Of the rank that grew most."""
    of_weights: float
    """The same, in float32 weights of the model."""
    received_mib: float
    """Of one step, on the first rank."""


def model(name: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    width, layers = SIZES[name]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


class Stepper:
    """The engine of a case, and the rows of this rank."""

    def __init__(self, case: Case, folder: Path, mesh: RankMesh) -> None:
        engine = EngineConfig.model_validate(dict(case.engine) | {"max_tokens_per_microbatch": BUDGET})
        config = ModelConfig.model_validate({"path": folder, "dtype": case.dtype})
        policy = load_policy(config, on_meta=is_sharded(engine, mesh))
        if case.lora is not None:
            add_adapter(policy, case.lora)
        self.engine = TrainEngine(PolicyModel(policy), OptimizerConfig(lr=1e-4), engine, mesh=mesh)
        self.rows = _own_rows(case)

    def step(self) -> None:
        self.engine.update(self.rows, imitation)


def _own_rows(case: Case) -> TensorDict:
    every = case.ranks // (case.tp * case.sp)
    mine = (distributed.get_rank() if case.ranks > 1 else 0) // (case.tp * case.sp)
    return take_rows(rows_of(torch.full((ROWS,), TOKENS)), torch.arange(mine, ROWS, every))


def _mesh(case: Case) -> RankMesh:
    group = distributed.group.WORLD if case.ranks > 1 else None
    return rank_mesh(group, device="cpu", tp=case.tp, sp=case.sp)


def time_all(rank: int, folder: Path, repeats: int) -> None:
    """Runs one rank of the timing processes. Rank 0 writes times and bytes per case and round."""
    _join(rank, folder / "times", RANKS)
    # Every rank creates every mesh and runs the cases that include it.
    meshes = {name: _mesh(case) for name, case in CASES.items()}
    steppers = {n: Stepper(c, folder / "large", meshes[n]) for n, c in CASES.items() if rank < c.ranks}
    names, found = list(CASES), {name: [] for name in CASES}
    for number in range(repeats + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            distributed.barrier()
            before = sum(received_bytes().values())
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            if name in steppers:
                steppers[name].step()
            cpu_s = time.process_time() - start_cpu_s
            received = sum(received_bytes().values()) - before
            distributed.barrier()
            found[name].append((time.perf_counter() - start_s, cpu_s, received))
    if rank == 0:
        # The first round is a warm-up.
        (folder / "times.json").write_text(json.dumps({name: taken[1:] for name, taken in found.items()}))
    distributed.destroy_process_group()


def weigh(rank: int, folder: Path, name: str) -> None:
    """Runs one rank of the memory measurement in a new process."""
    case = CASES[name]
    _join(rank, folder / "meet" / name, case.ranks)
    mesh = _mesh(case)

    def run(size: str) -> None:
        stepper = Stepper(case, folder / size, mesh)
        for _ in range(2):
            stepper.step()

    run("small")
    (folder / f"{name} {rank}.txt").write_text(str(peak_growth(lambda: run("large"))))
    distributed.destroy_process_group()


def _join(rank: int, place: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)


def measured(folder: Path, repeats: int) -> list[Found]:
    """Measures all cases."""
    for size in SIZES:
        model(size).save_pretrained(folder / size)
    weights = sum(parameter.numel() for parameter in model("large").parameters()) * 4
    (folder / "meet").mkdir()
    peaks = {}
    for name, case in CASES.items():
        spawn(weigh, (folder, name), nprocs=case.ranks)
        peaks[name] = max(int((folder / f"{name} {rank}.txt").read_text()) for rank in range(case.ranks))
    spawn(time_all, (folder, repeats), nprocs=RANKS)
    rounds = json.loads((folder / "times.json").read_text())
    single = rounds["single"]
    found = []
    for name, taken in rounds.items():
        seconds, _, received = zip(*taken, strict=True)
        ratios, cpu_ratios = ([a[i] / b[i] for a, b in zip(taken, single, strict=True)] for i in (0, 1))
        found.append(
            Found(
                name,
                CASES[name].ranks,
                round(statistics.median(seconds) * 1e3),
                round(statistics.median(ratios), 2),
                round(statistics.median(cpu_ratios), 2),
                round(peaks[name] / MIB),
                round(peaks[name] / weights, 2),
                round(statistics.median(received) / MIB, 1),
            )
        )
    return found


def table(found: list[Found]) -> str:
    """Returns the figures as a Markdown table."""
    lines = [
        "| what | processes | a step | of `single` | processor time per rank | peak memory per rank | in weights | "
        "received per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.what} | {f.processes} | {f.ms:g} ms | {f.of_single} | {f.cpu_of_single} | {f.peak_mib:g} MiB | "
        f"{f.of_weights} | {f.received_mib:g} MiB |"
        for f in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the figures; they have no bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    ran_on = machine()
    with tempfile.TemporaryDirectory() as name:
        found = measured(Path(name), arguments.repeats)
    text = table(found) if arguments.table else json.dumps({"machine": ran_on, "figures": [vars(f) for f in found]})
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
