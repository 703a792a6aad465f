"""GRPO with vLLM: weight transfer within and between GPUs, sleep, quantization and flash-attn."""

import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.benchmarks.gpu.cells import Cell, CellSkipped
from tests.benchmarks.gpu.recipe_runs import RecipeRun, Task

_EXPECTED_S = 120.0
_IDLE = ("actor.engine.offload=idle", "reference.engine.offload=idle")
_FLASH = tuple(f"{role}.engine.attention=flash_attention_2" for role in ("actor", "reference"))
_BFLOAT16 = (
    "rollout.vllm.dtype=bfloat16",
    "actor.engine.compute_dtype=bfloat16",
    "reference.engine.compute_dtype=bfloat16",
)
_SHARED = "{device: %s, pools: {main: [1]}, roles: {actor: main, reference: main, reward: main, rollout: main}}"
_SPLIT = (
    "{device: %s, pools: {main: [1], make: [1]}, roles: {actor: main, reference: main, reward: main, rollout: make}}"
)


@dataclass(frozen=True)
class VllmRun:
    """A run of recipes/grpo with vLLM."""

    name: str
    settings: tuple[str, ...] = ()
    gpu_settings: tuple[str, ...] = ()
    """Settings that a CPU does not support."""
    placement: str = _SHARED
    num_steps: int = 10
    learns: bool = False
    """Whether the run is long enough to require a gain."""
    num_gpus: int = 1
    package: str | None = None
    """A package that the run needs, and that a host with vLLM may lack."""
    capability: tuple[int, int] = (7, 5)
    """Required compute capability of a GPU."""
    cpu_obstacle: str | None = None
    """Reason why the run is impossible on a CPU; None if it is possible."""

    def all_settings(self, device: str) -> tuple[str, ...]:
        """Returns the settings of the recipe on a device, `cpu` or `cuda`."""
        on_gpu = (*_BFLOAT16, *self.gpu_settings) if device == "cuda" else ()
        return "rollout.engine=vllm", f"placement={self.placement % device}", *self.settings, *on_gpu


RUNS = (
    VllmRun(
        "vLLM on the actor's GPU, CUDA IPC, sleep",
        gpu_settings=("rollout.transfer.via=cuda_ipc", "rollout.vllm.sleep=true"),
        num_steps=100,
        learns=True,
    ),
    VllmRun("vLLM on the actor's GPU, offload idle, sleep", _IDLE, gpu_settings=("rollout.vllm.sleep=true",)),
    VllmRun(
        "vLLM on another GPU, async, NCCL",
        ("schedule.kind=async",),
        gpu_settings=("rollout.transfer.via=nccl",),
        placement=_SPLIT,
        num_gpus=2,
    ),
    VllmRun("vLLM with asynchronous scheduling", gpu_settings=("rollout.vllm.async_scheduling=true",)),
    VllmRun("vLLM with int8", ("rollout.quantization=int8",), package="torchao"),
    VllmRun(
        "vLLM with int4",
        ("rollout.quantization=int4",),
        package="torchao",
        capability=(8, 0),
        cpu_obstacle="vLLM has int4 only on GPUs",
    ),
    VllmRun("vLLM with fp8", ("rollout.quantization=fp8", *_BFLOAT16), capability=(8, 9)),
    VllmRun(
        "vLLM and flash-attn",
        _FLASH,
        package="flash_attn",
        capability=(8, 0),
        cpu_obstacle="flash-attn needs a GPU",
    ),
)


def vllm_cells(folder: Path, device: str, end_s: float) -> list[Cell]:
    """Returns a cell per run. All runs begin with the same model, and end before the Unix time `end_s`."""
    task = Task(folder, device, end_s)
    return [
        Cell(run.name, lambda i=i, run=run: _train(run, f"vllm_{i}", task, device), _EXPECTED_S)
        for i, run in enumerate(RUNS)
    ]


def _train(run: VllmRun, name: str, task: Task, device: str) -> str:
    """Trains, and returns accuracies and the gap between the log-probabilities of vLLM and the actor.

    On a GPU, raises AssertionError if a long run does not learn.
    """
    if obstacle := _find_obstacle(run, device):
        raise CellSkipped(obstacle)
    trained = task.train_grpo(name, *run.all_settings(device), num_steps=run.num_steps)
    figures = f"{trained.describe()}, {_describe_gap(trained)}"
    if run.learns and device == "cuda":
        trained.check_gain(figures)
    return figures


def _find_obstacle(run: VllmRun, device: str) -> str | None:
    if device == "cpu" and run.cpu_obstacle is not None:
        return run.cpu_obstacle
    if run.package is not None and find_spec(run.package) is None:
        return f"{run.package} is missing"
    if device == "cpu":
        return None
    if torch.cuda.device_count() < run.num_gpus:
        return f"it needs {run.num_gpus} GPUs"
    if torch.cuda.get_device_capability() < run.capability:
        return f"it needs compute capability {'.'.join(map(str, run.capability))}"
    return None


def _describe_gap(run: RecipeRun) -> str:
    gaps, largest = run.values("rollout_gap"), run.values("rollout_gap_max")
    return (
        f"rollout_gap mean {statistics.mean(gaps):.1e}, largest step {max(gaps):.1e}, largest token {max(largest):.1e}"
    )
