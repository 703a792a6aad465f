"""Costs of each parallelism: time of an optimizer step, peak memory per rank, and bytes between ranks.

python -m tests.benchmarks.strategies [--repeats N] [--table]

All cases have the same rows and the same model, and each process has one thread.

- Times: two processes have an engine for every case. A round runs every case once, in rotating order. In a case
  with one process, the other process waits.
- Ratios to `single` are medians over the rounds, of wall time and of a rank's CPU time. Waiting for a core does not
  increase CPU time.
- Memory is the peak growth of a new process that loads the model and takes two steps. Before, a small model loads all
  code.
- Bytes are the bytes that a rank receives over its sockets in a step, as counted by the kernel.
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
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import load_policy
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine, is_sharded
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.benchmarks.measure import MIB, machine, peak_growth, read_arguments, received_bytes
from tests.benchmarks.packing import imitation, rows_of
from tests.engines.losses import LOGPROBS
from tests.engines.tables import take_rows

RANKS = 2
ROWS, TOKENS = 16, 128
BUDGET = ROWS * TOKENS // RANKS
"""Tokens per rank and pass. A case with one process runs `RANKS` passes."""

VOCABULARY = 1024
SIZES = {"large": (384, 4), "small": (64, 2)}
"""Width and number of layers of the measured model, and of a model that only loads code."""


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
    "fsdp on one rank": Case(engine={"strategy": "fsdp"}),
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
    "fsdp on one rank, compute_dtype: bfloat16": Case(engine={"strategy": "fsdp", "compute_dtype": "bfloat16"}),
    "single, compute_dtype: float16": Case(engine={"compute_dtype": "float16"}),
    "single, dtype: bfloat16": Case(dtype="bfloat16"),
}


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case."""

    what: str
    processes: int
    ms: float
    """Median time of an optimizer step."""
    of_single: float
    """Ratio to the case `single`."""
    cpu_of_single: float
    """Ratio of the CPU times of rank 0, over all threads."""
    peak_mib: float
    """Memory of the rank with the largest growth."""
    of_weights: float
    """Ratio of `peak_mib` to the size of the float32 weights."""
    received_mib: float
    """Bytes that rank 0 receives in a step."""


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
        self.engine = FsdpEngine(PolicyModel(policy), policy_outputs, OptimizerConfig(lr=1e-4), engine, mesh=mesh)
        self.rows = _own_rows(case)

    def step(self) -> None:
        self.engine.update(self.rows, imitation, LOGPROBS)


def _own_rows(case: Case) -> TensorDict:
    num_shards = case.ranks // (case.tp * case.sp)
    shard = (distributed.get_rank() if case.ranks > 1 else 0) // (case.tp * case.sp)
    return take_rows(rows_of(torch.full((ROWS,), TOKENS)), torch.arange(shard, ROWS, num_shards))


def _mesh(case: Case) -> RankMesh:
    if case.ranks > 1:
        return rank_mesh(distributed.group.WORLD, device="cpu", tp=case.tp, sp=case.sp)
    group = distributed.new_group([0]) if case.engine.get("strategy") == "fsdp" else None
    return rank_mesh(group if isinstance(group, distributed.ProcessGroup) else None, device="cpu")


def time_all(rank: int, folder: Path, repeats: int, names: list[str]) -> None:
    """Runs one rank of the timing processes. Rank 0 writes times and bytes per case and round."""
    _join(rank, folder / "times", RANKS)
    # Every rank creates every mesh and runs the cases that include it.
    cases = {name: CASES[name] for name in names}
    meshes = {name: _mesh(case) for name, case in cases.items()}
    steppers = {n: Stepper(c, folder / "large", meshes[n]) for n, c in cases.items() if rank < c.ranks}
    measurements = {name: [] for name in names}
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
            measurements[name].append((time.perf_counter() - start_s, cpu_s, received))
    if rank == 0:
        # The first round is a warm-up.
        (folder / "times.json").write_text(json.dumps({name: values[1:] for name, values in measurements.items()}))
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


def _join(rank: int, file: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)


def measure(folder: Path, repeats: int, names: list[str]) -> list[CaseResult]:
    """Measures cases, which must include `single`."""
    for size in SIZES:
        model(size).save_pretrained(folder / size)
    weights = sum(parameter.numel() for parameter in model("large").parameters()) * 4
    (folder / "meet").mkdir()
    peaks = {}
    for name in names:
        case = CASES[name]
        spawn(weigh, (folder, name), nprocs=case.ranks)
        peaks[name] = max(int((folder / f"{name} {rank}.txt").read_text()) for rank in range(case.ranks))
    spawn(time_all, (folder, repeats, names), nprocs=RANKS)
    rounds = json.loads((folder / "times.json").read_text())
    single = rounds["single"]
    results = []
    for name, values in rounds.items():
        seconds, _, received = zip(*values, strict=True)
        ratios, cpu_ratios = ([a[i] / b[i] for a, b in zip(values, single, strict=True)] for i in (0, 1))
        results.append(
            CaseResult(
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
    return results


def table(results: list[CaseResult]) -> str:
    """Returns the figures as a Markdown table."""
    lines = [
        "| what | processes | step | / `single` | CPU time / `single` | peak per rank | / weights | "
        "received per rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.what} | {f.processes} | {f.ms:g} ms | {f.of_single} | {f.cpu_of_single} | {f.peak_mib:g} MiB | "
        f"{f.of_weights} | {f.received_mib:g} MiB |"
        for f in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the figures, which have no bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="besides `single`")
    arguments = read_arguments(parser, repeats=1, cases=["single"])
    names = [name for name in CASES if name == "single" or name in arguments.cases]
    ran_on = machine()
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), arguments.repeats, names)
    text = table(results) if arguments.table else json.dumps({"machine": ran_on, "figures": [vars(f) for f in results]})
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
