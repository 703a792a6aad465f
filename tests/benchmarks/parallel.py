"""Costs of each parallelism beside the values that `flowrl plan` expects: bytes, peak memory and CPU time of a rank.

python -m tests.benchmarks.parallel [--repeats N] [--table] [--cases CASE ...]

All cases of a model have the same rows, and each process has one thread. Values of a rank are those of the rank with
the largest one.

- Times: two processes have an engine for every case. A round runs every case once, in rotating order. In a case with
  one process, the other process waits. Ratios to the case of the same model on one process are medians over the rounds,
  of wall time and of CPU time. Waiting for a core does not increase CPU time. The expected ratio of CPU times is that
  of the FLOPs.
- Memory is the growth of the peak of a new process that loads the model and takes two steps. Before, a small model
  loads all code. The expected value is the estimate of flowrl.memory.
- Bytes are those that a rank receives over its sockets in a step, as counted by the kernel. The expected value has the
  formulas of flowrl.timing.pass_bytes. With two ranks, a rank sends what the other receives.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed
from torch.multiprocessing.spawn import spawn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flowrl.config import ActorConfig, LoraConfig, OptimizerConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.engines.train.base import TrainContext, load_train_engine_class
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.model_flops import planned_flops
from flowrl.memory.model_size import model_size_from_config
from flowrl.memory.role_memory import RoleModel, training_role
from flowrl.timing.pass_bytes import (
    all_reduce_bytes,
    broadcast_bytes,
    gathered_bytes,
    layer_bytes,
    stage_bytes,
    tied_bytes,
)
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
"""Width and number of layers of the measured models, and of models that only load code."""


@dataclass(frozen=True)
class Case:
    """A parallelism of a model."""

    ranks: int = 1
    engine: Mapping[str, object] = field(default_factory=dict)
    tp: int = 1
    sp: int = 1
    pp: int = 1
    lora: LoraConfig | None = None
    dtype: str = "float32"
    model: str = "dense"

    @property
    def baseline(self) -> str:
        """Case of the same model on one process."""
        return "single" if self.model == "dense" else "single, experts"

    @property
    def num_row_parts(self) -> int:
        """Number of data-parallel ranks."""
        return self.ranks // (self.tp * self.sp * self.pp)


LORA = LoraConfig(rank=16)
EXPERTS = Case(RANKS, {"strategy": "fsdp"}, model="experts")
CASES = {
    "single": Case(),
    "fsdp on one rank": Case(engine={"strategy": "fsdp"}),
    "ddp": Case(RANKS, {"strategy": "ddp"}),
    "zero1": Case(RANKS, {"strategy": "zero1"}),
    "fsdp": Case(RANKS, {"strategy": "fsdp"}),
    "fsdp, reshard_after_forward: false": Case(RANKS, {"strategy": "fsdp", "reshard_after_forward": False}),
    "tp": Case(RANKS, tp=RANKS),
    "tp, sequence_parallel_norms: true": Case(RANKS, {"sequence_parallel_norms": True}, tp=RANKS),
    "sp": Case(RANKS, {"strategy": "ddp"}, sp=RANKS),
    "pp": Case(RANKS, pp=RANKS),
    "single, gradient_checkpointing": Case(engine={"gradient_checkpointing": True}),
    "single, LoRA": Case(lora=LORA),
    "fsdp, LoRA": Case(RANKS, {"strategy": "fsdp"}, lora=LORA),
    "tp, LoRA": Case(RANKS, tp=RANKS, lora=LORA),
    "pp, LoRA": Case(RANKS, pp=RANKS, lora=LORA),
    "single, compute_dtype: bfloat16": Case(engine={"compute_dtype": "bfloat16"}),
    "fsdp on one rank, compute_dtype: bfloat16": Case(engine={"strategy": "fsdp", "compute_dtype": "bfloat16"}),
    "single, compute_dtype: float16": Case(engine={"compute_dtype": "float16"}),
    "single, dtype: bfloat16": Case(dtype="bfloat16"),
    "single, experts": Case(model="experts"),
    "fsdp, experts": EXPERTS,
    "fsdp, expert_parallel: true": replace(EXPERTS, engine={"strategy": "fsdp", "expert_parallel": True}),
}


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case, and their expected values."""

    what: str
    processes: int
    ms: float
    """Median time of an optimizer step."""
    of_baseline: float
    """Ratio to the case of the same model on one process."""
    cpu_of_baseline: float
    """Ratio of the CPU times, over all threads."""
    expected_cpu: float
    peak_mib: float
    expected_peak_mib: float
    received_mib: float
    """Bytes that a rank receives in a step."""
    expected_received_mib: float


# Models.


def model(name: str, size: str) -> PreTrainedModel:
    torch.manual_seed(0)
    width, layers = SIZES[size]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": TOKENS,
        "tie_word_embeddings": True,
    }
    if name == "dense":
        return Qwen2ForCausalLM(Qwen2Config(**settings))
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "head_dim": width // 4,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts, router_aux_loss_coef=0.01))


def start(case: Case, folder: Path, group: distributed.ProcessGroup | None) -> FsdpEngine:
    """Returns the engine of a case. `group` has its ranks."""
    config = ActorConfig.model_validate(
        {
            "model": {"path": folder / case.model, "dtype": case.dtype},
            "optimizer": OptimizerConfig(lr=1e-4),
            "engine": dict(case.engine) | {"max_tokens_per_microbatch": BUDGET},
            "lora": case.lora,
        }
    )
    context = TrainContext("policy", config, torch.device("cpu"), group, pp=case.pp, sp=case.sp, tp=case.tp)
    engine = load_train_engine_class("fsdp", pp=case.pp).start(context)
    assert isinstance(engine, FsdpEngine)
    return engine


def own_rows(case: Case) -> TensorDict:
    rank = distributed.get_rank() if case.ranks > 1 else 0
    part = rank // (case.tp * case.sp) % case.num_row_parts
    return take_rows(rows_of(torch.full((ROWS,), TOKENS)), torch.arange(part, ROWS, case.num_row_parts))


# Expected values. All ranks of a pipeline stage have the same.


@cache
def role_model(name: str, stage: int = 0) -> RoleModel:
    """Returns what `flowrl plan` knows about the model of a case."""
    case = CASES[name]
    config = ActorConfig.model_validate(
        {
            "model": {"path": "model", "dtype": case.dtype},
            "optimizer": OptimizerConfig(lr=1e-4),
            "engine": dict(case.engine) | {"max_tokens_per_microbatch": BUDGET},
        }
    )
    with torch.device("meta"):
        size = model_size_from_config(model(case.model, "large").config.to_dict())
    assert size is not None
    mesh = Mesh(case.pp, case.num_row_parts, case.sp, case.tp)
    param_bytes = 2 if case.dtype == "bfloat16" else 4
    return RoleModel(size, config.engine, mesh, "cpu", param_bytes, True, TOKENS, lora=case.lora, stage=stage)


def largest(expected: Callable[[str, int], float], name: str) -> float:
    """Returns an expected value of the stage with the largest one."""
    return max(expected(name, stage) for stage in range(CASES[name].pp))


def expected_peak(name: str, stage: int) -> int:
    memory = training_role(role_model(name, stage), ROWS, "none", copies_checkpoints=False)
    return memory.resident + max(call.total for call in memory.calls)


def expected_flops(name: str, stage: int) -> float:
    case, model = CASES[name], role_model(name, stage)
    flops = planned_flops(model.size.config, has_head=True, lora=case.lora)
    assert flops is not None
    lengths = [TOKENS] * (ROWS // case.num_row_parts)
    num_targets = len(lengths) * (TOKENS - 1)
    head = flops.count([], num_targets, is_training=True)
    layers = flops.count(lengths, 0, is_training=True)
    if model.engine.gradient_checkpointing:
        layers += flops.count_recomputed(lengths, 0, layers=True, head=False)
    own = layers * model.num_layers / model.size.layers + head * model.has_head
    return own / (case.tp * case.sp)


def expected_bytes(name: str, stage: int) -> float:
    case, model = CASES[name], role_model(name, stage)
    num_tokens = ROWS // case.num_row_parts * TOKENS
    num_micros = -(-num_tokens // (BUDGET * case.sp))
    received = num_micros * gathered_bytes(model, is_training=True) + layer_bytes(model, num_tokens, is_training=True)
    # The first stage receives only gradients, and the last one only hidden states.
    received += stage_bytes(model, num_tokens) + tied_bytes(model)
    return received + all_reduce_bytes(model) + broadcast_bytes(model)


# Measurements.


def _join(rank: int, file: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)


def _group(case: Case) -> distributed.ProcessGroup | None:
    group = distributed.group.WORLD
    if case.ranks == 1:
        group = distributed.new_group([0]) if case.engine.get("strategy") == "fsdp" else None
    return group if isinstance(group, distributed.ProcessGroup) else None


def time_all(rank: int, folder: Path, repeats: int, names: list[str]) -> None:
    """Runs one rank of the timing processes, which writes times and bytes per case and round."""
    _join(rank, folder / "times", RANKS)
    # Every rank creates every group and runs the cases that include it.
    groups = {name: _group(CASES[name]) for name in names}
    names_of_rank = [name for name in names if rank < CASES[name].ranks]
    engines = {name: start(CASES[name], folder / "large", groups[name]) for name in names_of_rank}
    rows = {name: own_rows(CASES[name]) for name in names_of_rank}
    measurements = {name: [] for name in names}
    for number in range(repeats + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            distributed.barrier()
            before = sum(received_bytes().values())
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            if name in engines:
                engines[name].update(rows[name], imitation, LOGPROBS)
            cpu_s = time.process_time() - start_cpu_s
            received = sum(received_bytes().values()) - before
            distributed.barrier()
            measurements[name].append((time.perf_counter() - start_s, cpu_s, received))
    # The first round is a warm-up.
    rounds = {name: values[1:] for name, values in measurements.items() if name in engines}
    (folder / f"times{rank}.json").write_text(json.dumps(rounds))
    distributed.destroy_process_group()


def weigh(rank: int, folder: Path, name: str) -> None:
    """Runs one rank of the memory measurement in a new process."""
    case = CASES[name]
    _join(rank, folder / "meet" / name, case.ranks)
    group = _group(case)

    def run(size: str) -> None:
        engine, rows = start(case, folder / size, group), own_rows(case)
        for _ in range(2):
            engine.update(rows, imitation, LOGPROBS)

    run("small")
    gc.collect()
    growth = peak_growth(lambda: run("large"))
    (folder / f"{name}.{rank}.txt").write_text(str(growth))
    distributed.destroy_process_group()


def measure(folder: Path, repeats: int, names: list[str]) -> list[CaseResult]:
    """Measures cases, which must include their baselines."""
    for size in SIZES:
        for name in {CASES[name].model for name in names}:
            model(name, size).save_pretrained(folder / size / name)
    (folder / "meet").mkdir()
    # glibc then returns freed blocks at once, so that the resident size follows the tensors.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    for name in names:
        spawn(weigh, (folder, name), nprocs=CASES[name].ranks)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    spawn(time_all, (folder, repeats, names), nprocs=RANKS)
    rounds = [json.loads((folder / f"times{rank}.json").read_text()) for rank in range(RANKS)]
    return [case_result(name, folder, rounds) for name in names]


def case_result(name: str, folder: Path, rounds: list[dict[str, list[list[float]]]]) -> CaseResult:
    """Returns the result of a case from (seconds, CPU seconds, received bytes) by rank, case and round."""
    case, baseline = CASES[name], CASES[name].baseline
    seconds = [values[0] for values in rounds[0][name]]
    ratios, *cpu_ratios = (
        [own[i] / alone[i] for own, alone in zip(rounds[rank][name], rounds[0][baseline], strict=True)]
        for rank, i in [(0, 0), *((rank, 1) for rank in range(case.ranks))]
    )
    received = [[values[2] for values in rounds[rank][name]] for rank in range(case.ranks)]
    peak = max(int((folder / f"{name}.{rank}.txt").read_text()) for rank in range(case.ranks))
    return CaseResult(
        name,
        case.ranks,
        round(statistics.median(seconds) * 1e3),
        round(statistics.median(ratios), 2),
        round(max(map(statistics.median, cpu_ratios)), 2),
        round(largest(expected_flops, name) / largest(expected_flops, baseline), 2),
        round(peak / MIB),
        round(largest(expected_peak, name) / MIB),
        round(max(map(statistics.median, received)) / MIB, 1),
        round(largest(expected_bytes, name) / MIB, 1),
    )


def table(results: list[CaseResult]) -> str:
    """Returns the figures as a Markdown table."""
    lines = [
        "| what | processes | step | / one process | CPU time / one process | expected | peak | expected | received | "
        "expected |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.what} | {f.processes} | {f.ms:g} ms | {f.of_baseline} | {f.cpu_of_baseline} | {f.expected_cpu} | "
        f"{f.peak_mib:g} MiB | {f.expected_peak_mib:g} MiB | {f.received_mib:g} MiB | {f.expected_received_mib:g} MiB |"
        for f in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the figures, which have no bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="besides their baselines")
    arguments = read_arguments(parser, repeats=1, cases=["single", "pp"])
    baselines = {CASES[name].baseline for name in arguments.cases}
    names = [name for name in CASES if name in baselines or name in arguments.cases]
    ran_on = machine()
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), arguments.repeats, names)
    text = table(results) if arguments.table else json.dumps({"machine": ran_on, "figures": [vars(f) for f in results]})
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
