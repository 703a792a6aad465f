"""Sharding, CPU offload, generation and the memory estimate on one GPU."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] (documented there)
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, ModelConfig, OptimizerConfig, RolloutConfig
from flowrl.config.load import load
from flowrl.engines.models.loading import load_policy
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh, rank_mesh
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.memory.device_settings import resolve_settings
from flowrl.memory.memory_estimate import estimate_memory, read_sizes
from recipes.grpo.config import GRPOConfig
from tests.benchmarks.gpu.cells import Cell, CellSkipped
from tests.benchmarks.gpu.models import (
    LOGPROBS,
    WITH_DETACHED_ENTROPY,
    build_model,
    free_memory,
    make_rows,
    model_config,
    synchronize,
    token_loss,
)
from tests.configs import plan_run
from tests.engines.closeness import relative_error
from tests.engines.tables import table
from tests.engines.tiny import qwen2, tokenizer

_GRADIENT_RTOL = 0.05
"""Bound of the relative difference of gradient norms in bfloat16. FSDP2 rounds complete layers, autocast only products.
"""
_LOGPROBS_RTOL = 1e-3
_PLAN_RTOL = 0.2
"""Bound of the relative error of `flowrl plan`. On an H200 with FSDP2, it was 0.05 (0.5B) and 0.01 (1.5B)."""


def engine_cells(device: torch.device, folder: Path) -> list[Cell]:
    small, large = ("0.5B", "1.5B") if device.type == "cuda" else ("tiny", "tiny")
    return [
        Cell("FSDP2 and NCCL on one rank, bfloat16", lambda: _compare_sharded(small, device, folder), 20),
        Cell("float32 log-probabilities", lambda: _compare_logprobs(device), 5),
        Cell(f"peak memory and plan, {small}, FSDP2", lambda: _compare_peak(small, device, folder, "fsdp"), 10),
        Cell(
            f"peak memory and plan, {large}, checkpointing",
            lambda: _compare_peak(large, device, folder, "single", "actor.engine.gradient_checkpointing=true"),
            15,
        ),
        Cell(f"offload idle, {large}", lambda: _measure_idle_offload(large, device), 20),
        Cell(f"decode, engine hf, {small}", lambda: _measure_decode(small, device), 20),
        Cell(f"decode, engine hf, {large}", lambda: _measure_decode(large, device), 25),
        # Last, because the optimizer steps on the CPU take longest, and depend most on the machine.
        Cell(f"offload parameters, {small}", lambda: _measure_parameter_offload(small, device, folder), 35),
    ]


@contextmanager
def one_rank_mesh(device: torch.device) -> Iterator[RankMesh]:
    """Yields the mesh of a role with one rank, whose model FSDP2 shards."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        assert isinstance(group, distributed.ProcessGroup)
        yield rank_mesh(group, device=device)
    finally:
        distributed.destroy_process_group()


class _Trainer:
    """An engine that trains 4,096 tokens per step, on a CPU 32 tokens."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, mesh: RankMesh = SINGLE_PROCESS, **settings: str
    ) -> None:
        num_rows, length = (4, 1024) if device.type == "cuda" else (2, 16)
        self.device, self.rows = device, make_rows(num_rows, length, model.config.vocab_size)
        config = EngineConfig.model_validate({"compute_dtype": "bfloat16", **settings})
        self.engine = FsdpEngine(
            PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-6), config, mesh=mesh, device=device
        )
        self.num_parameters = sum(parameter.numel() for parameter in self.engine.model.parameters())

    @classmethod
    def load_sharded(cls, path: Path, device: torch.device, mesh: RankMesh, **settings: str) -> "_Trainer":
        """Shards a model while it is loaded, as the worker of an actor does."""
        free_memory(device)
        model = load_policy(ModelConfig(path=path), on_meta=True)
        trainer = cls(model, device, mesh, strategy="fsdp", **settings)
        assert trainer.engine.is_sharded, "the model is not sharded"
        return trainer

    def forward_backward(self) -> None:
        self.engine.forward_backward(self.rows, token_loss, LOGPROBS)
        synchronize(self.device)

    def optim_step(self) -> float:
        """Takes the optimizer step. Returns the norm of the gradient."""
        metrics = self.engine.optim_step()
        synchronize(self.device)
        return metrics["grad_norm"].result()

    def time_steps(self) -> tuple[float, float, list[float]]:
        """Returns the median seconds of the two halves of a step, and the gradient norms of all steps."""
        halves, norms = [], []
        for _ in range(5):
            first_s = _seconds(self.forward_backward)
            start_s = time.perf_counter()
            norms.append(self.optim_step())
            halves.append((first_s, time.perf_counter() - start_s))
        forward_backward_s, optim_s = (statistics.median(times) for times in zip(*halves[2:], strict=True))
        return forward_backward_s, optim_s, norms


def _saved_model(size: str, device: torch.device, folder: Path) -> Path:
    """Saves the model of `build_model`, unless this has been done. Returns its folder."""
    path = folder / f"model_{size}"
    if not path.exists():
        build_model(size, device).save_pretrained(path)
    return path


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _compare_sharded(size: str, device: torch.device, folder: Path) -> str:
    """Compares steps of a sharded model with steps in one process. Raises AssertionError if gradients differ."""
    path = _saved_model(size, device, folder)
    free_memory(device)
    *single_s, single_norms = _Trainer(build_model(size, device), device).time_steps()
    with one_rank_mesh(device) as mesh:
        *sharded_s, sharded_norms = _Trainer.load_sharded(path, device, mesh).time_steps()
    error = _largest_error(sharded_norms, single_norms)
    milliseconds = f"{sum(sharded_s) * 1e3:.0f} ms per step, {sum(single_s) * 1e3:.0f} ms in one process"
    return f"gradient norms differ by {error:.1e}, {milliseconds}"


def _largest_error(norms: list[float], expected: list[float]) -> float:
    """Returns the largest relative error. Raises AssertionError if it exceeds `_GRADIENT_RTOL`."""
    error = max(abs(one / other - 1) for one, other in zip(norms, expected, strict=True))
    assert error <= _GRADIENT_RTOL, f"gradient norms {norms} differ from {expected}"
    return error


def _measure_idle_offload(size: str, device: torch.device) -> str:
    """Measures the second offload of weights and Adam's moments, and the second onload of the weights."""
    free_memory(device)
    trainer = _Trainer(build_model(size, device), device, offload="idle")
    times = []
    for _ in range(2):
        trainer.forward_backward()
        trainer.optim_step()
        times = [_seconds(lambda: (trainer.engine.offload(), synchronize(device)))]
        times.append(_seconds(lambda: (trainer.engine.onload(), synchronize(device))))
    state, weights = 12 * trainer.num_parameters, 4 * trainer.num_parameters
    offload = f"offload {state / 1e9:.2f} GB in {times[0]:.2f} s, {state / times[0] / 1e9:.1f} GB/s"
    return f"{offload}; onload {weights / 1e9:.2f} GB in {times[1]:.2f} s, {weights / times[1] / 1e9:.1f} GB/s"


def _measure_parameter_offload(size: str, device: torch.device, folder: Path) -> str:
    """Measures a step of a model whose weights and optimizer are on the CPU. In a forward and backward pass, the
    float32 weights move to the GPU twice, and their gradients move back once.
    """
    path = _saved_model(size, device, folder)
    with one_rank_mesh(device) as mesh:
        on_gpu_s, _, norms = _Trainer.load_sharded(path, device, mesh).time_steps()
        trainer = _Trainer.load_sharded(path, device, mesh, offload="parameters")
        passes_s, optim_s, offloaded_norms = trainer.time_steps()
    _largest_error(offloaded_norms, norms)
    num_bytes = 12 * trainer.num_parameters
    times = f"passes {passes_s * 1e3:.0f} ms ({on_gpu_s * 1e3:.0f} ms without offload)"
    return f"{times}, at least {num_bytes / passes_s / 1e9:.1f} GB/s, optimizer step on the CPU {optim_s * 1e3:.0f} ms"


def _measure_decode(size: str, device: torch.device) -> str:
    """Measures a decode step in bfloat16. The time of the prefill cancels in the difference of two lengths."""
    free_memory(device)
    model = build_model(size, device, torch.bfloat16)
    short, long, counts = (32, 96, (64, 256)) if device.type == "cuda" else (2, 34, (2, 4))
    figures = []
    for num_rows in counts:
        seconds = []
        for num_tokens in (short, short, long):  # the first one warms up
            rollout = HfRollout(model, tokenizer(), RolloutConfig(max_response_tokens=num_tokens), device)
            prompts, samples = [[2 + i % 30] * 16 for i in range(num_rows)], torch.zeros(num_rows).long()
            requests = make_requests(prompts, torch.arange(num_rows), samples, seed=0)
            seconds.append(_seconds(lambda rollout=rollout, requests=requests: rollout.generate(requests)))
        step_s = (seconds[2] - seconds[1]) / (long - short)
        figures.append(f"{num_rows} rows {step_s * 1e3:.1f} ms per step, {num_rows / step_s:,.0f} tokens/s")
    return "; ".join(figures)


def _compare_peak(size: str, device: torch.device, folder: Path, strategy: str, *settings: str) -> str:
    """Compares the peak of updates with `flowrl plan` for the same settings.

    Raises AssertionError if they differ by more than `_PLAN_RTOL`.
    """
    num_rows, length = (16, 1024) if device.type == "cuda" else (2, 16)
    path = folder / f"config_{size}"
    model_config(size).save_pretrained(path)
    overrides = [
        f"actor.model.path={path}",
        "actor.engine.compute_dtype=bfloat16",
        f"actor.engine.strategy={strategy}",
        "placement=placement/single.yaml",
        f"placement.device={device.type}",
        "samples_per_prompt=1",
        f"batch_size={num_rows}",
        f"minibatch_size={num_rows}",
        f"data.max_prompt_tokens={length // 4}",
        f"rollout.max_response_tokens={length - length // 4}",
        "algorithm.estimator=reinforce_plus_plus",
        "actor.kl_loss_coef=0",  # the measured engine has no reference
        *settings,
    ]
    stated = load("recipes/grpo/arithmetic.yaml", overrides, GRPOConfig)
    planned = plan_run(stated, [1])
    config = resolve_settings(stated, planned)
    assert isinstance(config, GRPOConfig)
    (memory,) = estimate_memory(config, planned, read_sizes(config))
    actor = memory.roles["actor"]
    assert actor is not None
    expected = memory.during("actor", next(call for call in actor.calls if call.name == "update"))
    if device.type == "cpu":
        raise CellSkipped(f"the plan is {expected / 1e9:.2f} GB, but a CPU does not report the peak of its tensors")
    free_memory(device)
    rows = make_rows(num_rows, length, model_config(size).vocab_size)
    with one_rank_mesh(device) as mesh:
        model, actor = PolicyModel(build_model(size, device)), config.actor
        engine = FsdpEngine(model, policy_outputs, actor.optimizer, actor.engine, mesh=mesh, device=device)
        for _ in range(2):
            engine.update(rows, token_loss, WITH_DETACHED_ENTROPY)  # as an actor without entropy_coef
        synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    process = total - free - torch.cuda.memory_reserved(device)
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    peak = reserved + process
    sizes = f"tensors {allocated / 1e9:.2f} GB, reserved {reserved / 1e9:.2f}, process {process / 1e9:.2f}"
    shown = f"plan {expected / 1e9:.2f} GB, measured {peak / 1e9:.2f} ({expected / peak - 1:+.0%}): {sizes}"
    assert abs(expected / peak - 1) <= _PLAN_RTOL, shown
    return shown


def _compare_logprobs(device: torch.device) -> str:
    """Compares log-probabilities of a tiny float32 model with those of the CPU."""
    results = []
    for where in (device, torch.device("cpu")):
        engine = FsdpEngine(PolicyModel(qwen2()), policy_outputs, None, EngineConfig(), device=where)
        results.append(engine.forward(table(16), LOGPROBS)["logprobs"])
    error = relative_error(*results)
    assert error <= _LOGPROBS_RTOL, f"relative error {error:.1e}, limit {_LOGPROBS_RTOL:.0e}"
    return f"relative error {error:.1e} to the CPU"
