"""Speed of training steps: tokens/s, TFLOP/s, MFU and peak memory, and the kernels of one step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage] (the profiler returns it)
from torch.profiler import ProfilerActivity, profile

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.benchmarks.gpu.cells import Cell, CellSkipped, print_line
from tests.benchmarks.gpu.engines import one_rank_mesh
from tests.benchmarks.gpu.flops import peak_tflops, training_flops
from tests.benchmarks.gpu.models import (
    LOGPROBS,
    WITH_ENTROPY,
    build_model,
    free_memory,
    make_rows,
    model_config,
    synchronize,
    token_loss,
)

_STEPS_S = 8.0
"""No step of a cell starts later than this after the end of its first step."""
_CELL_S = _STEPS_S + 4.0
_COMPILE_S = 30.0
_WARMUP, _REPEATS = 2, 5
_NUM_TOKENS = 16_384
_NUM_KERNELS = 24


@dataclass(frozen=True)
class TrainingSetup:
    """Model size and precision of a training step."""

    size: Literal["0.5B", "1.5B"]
    weights: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights. float32 computes in bfloat16, with autocast or FSDP2."""
    strategy: Literal["single", "fsdp"] = "single"
    checkpointing: bool = False
    entropy: bool = False
    """Whether the loss contains the entropy."""
    compile: bool = False
    offload_activations: bool = False
    length: int = 1024
    """Tokens per row. A step has 16,384 tokens, or one row if the row is longer."""

    @property
    def name(self) -> str:
        compute = "FSDP2" if self.strategy == "fsdp" else "autocast"
        precision = compute if self.weights == "float32" else "bf16 weights"
        names = ("checkpointing", "entropy", "compile", "offload_activations")
        options = [name.replace("_", " ") for name in names if getattr(self, name)]
        length = [f"rows of {self.length:,}"] if self.length != 1024 else []
        return ", ".join([self.size, precision, *options, *length])


SETUPS = (
    TrainingSetup("1.5B", strategy="fsdp", checkpointing=True),
    TrainingSetup("0.5B"),
    TrainingSetup("1.5B", checkpointing=True),
    TrainingSetup("1.5B", "bfloat16", checkpointing=True),
    TrainingSetup("0.5B", "bfloat16"),
    TrainingSetup("1.5B", "bfloat16"),
    TrainingSetup("0.5B", checkpointing=True),
    TrainingSetup("0.5B", entropy=True),
)
LONG = (
    TrainingSetup("1.5B", checkpointing=True, length=32_768),
    TrainingSetup("1.5B", checkpointing=True, offload_activations=True, length=32_768),
    TrainingSetup("1.5B", checkpointing=True, offload_activations=True),
)
COMPILED = (
    TrainingSetup("1.5B", checkpointing=True, compile=True),
    TrainingSetup("0.5B", compile=True),
)
COMPILED_FSDP = TrainingSetup("1.5B", strategy="fsdp", checkpointing=True, compile=True)
"""Not part of tests/run_gpu.sh: on an H200, its first step did not finish within 50 s."""


def mfu_cells(device: torch.device) -> list[Cell]:
    """Returns a cell per setup without compilation, and the kernels of the first two."""
    cells = [_update_cell(setup, device, _CELL_S) for setup in (*SETUPS, *LONG)]
    return [*cells[:2], *(_kernels_cell(setup, device, _CELL_S) for setup in SETUPS[:2]), *cells[2:]]


def compile_cells(device: torch.device) -> list[Cell]:
    """Returns the cells with compilation, whose first steps take long."""
    cells = [_update_cell(setup, device, _COMPILE_S) for setup in COMPILED]
    return [cells[0], _kernels_cell(COMPILED[0], device, _COMPILE_S / 2), *cells[1:]]


def compiled_fsdp_cells(device: torch.device) -> list[Cell]:
    return [_update_cell(COMPILED_FSDP, device, _COMPILE_S)]


def _kernels_cell(setup: TrainingSetup, device: torch.device, expected_s: float) -> Cell:
    return Cell(f"longest kernels, {setup.name}", lambda: _find_longest_kernels(setup, device), expected_s)


def _update_cell(setup: TrainingSetup, device: torch.device, expected_s: float) -> Cell:
    return Cell(f"update, {setup.name}", lambda: _measure(setup, device), expected_s)


class TimedEngine:
    """A training engine with one micro-batch per step."""

    def __init__(self, setup: TrainingSetup, device: torch.device, mesh: RankMesh = SINGLE_PROCESS) -> None:
        """Builds the engine and one micro-batch of rows. On a CPU, the model is tiny and has 4 rows of 16 tokens."""
        self._device = device
        num_rows = max(1, _NUM_TOKENS // setup.length)
        size, num_rows, length = (setup.size, num_rows, setup.length) if device.type == "cuda" else ("tiny", 4, 16)
        self._config = model_config(size)
        self._outputs = WITH_ENTROPY if setup.entropy else LOGPROBS
        self._lengths = [length] * num_rows
        self._rows = make_rows(num_rows, length, self._config.vocab_size)
        engine = EngineConfig(
            strategy=setup.strategy,
            compute_dtype="bfloat16" if setup.weights == "float32" else None,
            gradient_checkpointing=setup.checkpointing,
            compile=setup.compile,
            offload_activations=setup.offload_activations,
            max_tokens_per_microbatch=num_rows * length,
        )
        model = build_model(size, device, torch.float32 if setup.weights == "float32" else torch.bfloat16)
        self._engine = FsdpEngine(
            PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-6), engine, mesh=mesh, device=device
        )

    @classmethod
    @contextmanager
    def start(cls, setup: TrainingSetup, device: torch.device) -> Iterator["TimedEngine"]:
        """Yields an engine, with the process group that FSDP2 needs. Raises CellSkipped for compilation on a CPU."""
        if setup.compile and device.type == "cpu":
            raise CellSkipped("compilation for a CPU takes minutes")
        free_memory(device)
        with one_rank_mesh(device) if setup.strategy == "fsdp" else nullcontext(SINGLE_PROCESS) as mesh:
            yield cls(setup, device, mesh)

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def flops(self) -> int:
        return training_flops(self._config, self._lengths, self.num_tokens - len(self._lengths))

    def step(self) -> float:
        """Takes an optimizer step. Returns its duration in seconds."""
        start_s = time.perf_counter()
        self._engine.update(self._rows, token_loss, self._outputs)
        synchronize(self._device)
        return time.perf_counter() - start_s


def _measure(setup: TrainingSetup, device: torch.device) -> str:
    with TimedEngine.start(setup, device) as engine:
        return _time_steps(engine, device)


def _time_steps(engine: TimedEngine, device: torch.device) -> str:
    first_s = engine.step()
    start_s = time.perf_counter()
    times = [engine.step() for _ in range(_WARMUP - 1)]
    for _ in range(_REPEATS):
        if len(times) >= _WARMUP and time.perf_counter() - start_s > _STEPS_S:
            break
        times.append(engine.step())
    measured = sorted(times[_WARMUP - 1 :])
    duration_s = measured[len(measured) // 2]
    tflops = engine.flops / duration_s / 1e12
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    mfu = "MFU unknown" if peak is None else f"MFU {tflops / peak:.1%}"
    memory = f", peak {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB" if device.type == "cuda" else ""
    speed = f"{engine.num_tokens / duration_s:,.0f} tokens/s, {tflops:.3g} TFLOP/s, {mfu}{memory}"
    return f"{speed}, {len(measured)} steps of {duration_s * 1e3:.0f} ms, first step {first_s:.1f} s"


def _find_longest_kernels(setup: TrainingSetup, device: torch.device) -> str:
    """Prints the kernels with the largest total time in one step, and the calls for which the host waits for the GPU.
    On a CPU, prints operators.
    """
    is_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with TimedEngine.start(setup, device) as engine:
        for _ in range(_WARMUP):
            engine.step()
        with profile(activities=[activity], acc_events=True) as profiled:  # else torch warns
            step_ms = engine.step() * 1e3
    events = profiled.key_averages()
    if is_gpu:
        # Without the calls on the CPU that start kernels.
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        times = [(event.self_device_time_total / 1e3, event.count, event.key) for event in kernels]
    else:
        times = [(event.self_cpu_time_total / 1e3, event.count, event.key) for event in events]
    total_ms = sum(milliseconds for milliseconds, _, _ in times)
    longest = sorted(times, reverse=True)[:_NUM_KERNELS]
    for milliseconds, count, name in longest:
        print_line(f"  {milliseconds:8.2f} ms {milliseconds / total_ms:6.1%} {count:5d} x {name[:90]}")
    waits = {event.key: event.count for event in events if "Synchronize" in event.key}
    share = sum(milliseconds for milliseconds, _, _ in longest) / total_ms
    found = f"{len(longest)} kernels above take {share:.0%} of {total_ms:.1f} ms in a step of {step_ms:.1f} ms"
    return f"{found}, {sum(count for _, count, _ in times):,} kernels, waits {waits or 'none'}"
