"""Program of four ranks that train replicas with and without an all-reduce during the last backward pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.config import EngineConfig
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.parallel import gradients
from flowrl.engines.parallel.rank_mesh import rank_mesh
from flowrl.engines.train.base import Denominators
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import MicroBatch
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.strategies import LORA, OPTIMIZER, POLICY, ROWS, policy_loss
from tests.engines.tables import VOCABULARY, table, take_rows
from tests.engines.tiny import qwen2, to_float64

BUCKET_BYTES = 2**14
"""Bytes of a bucket, so that the tiny models have several."""

NUM_STEPS = 3

Step = Callable[[FsdpEngine, TensorDict, int], Any]
"""Takes an optimizer step on the rows of this rank."""


def make_policy(group: ProcessGroup, *, lora: bool = False, sp: int = 1, **settings: Any) -> FsdpEngine:
    model = qwen2() if "compute_dtype" in settings else to_float64(qwen2())
    if lora:
        add_adapter(model, LORA)
    config = EngineConfig.model_validate({"strategy": "ddp", "max_tokens_per_microbatch": 20} | settings)
    mesh = rank_mesh(group, device="cpu", sp=sp)
    return FsdpEngine(PolicyModel(model), policy_outputs, OPTIMIZER, config, mesh=mesh)


def make_bigram(group: ProcessGroup, **settings: Any) -> FsdpEngine:
    """Returns an engine of a model in which no gradient reaches one layer."""
    config = EngineConfig.model_validate({"strategy": "ddp", "max_tokens_per_microbatch": 20} | settings)
    model = Bigram(VOCABULARY, 64).double()
    return FsdpEngine(model, bigram_outputs, OPTIMIZER, config, mesh=rank_mesh(group, device="cpu"))


def update(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    return engine.update(rows, policy_loss, POLICY)


def update_bigram(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    return engine.update(rows, bigram_loss, LOGPROBS)


def update_on_two_losses(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    engine.forward_backward(rows, policy_loss, POLICY, weight=0.5)
    return engine.update(take_rows(rows, torch.arange(len(rows["rows"]) // 2)), policy_loss, POLICY)


def step_in_two_halves(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    engine.forward_backward(rows, policy_loss, POLICY)
    return engine.optim_step()


class _Failing(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("out of memory")


def update_after_a_failure(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    """Fails in the layer before which a backward pass of this rank ends, then repeats the step without failure."""
    assert isinstance(engine.model, PolicyModel)
    rank = distributed.get_rank()
    layer = engine.model.language_model.model.layers[rank % 2]
    hook = layer.register_forward_hook(lambda *arguments: _Failing.apply(arguments[-1]))
    try:
        engine.update(rows, policy_loss, POLICY)
    except RuntimeError as error:
        assert "out of memory" in str(error)
    else:
        assert len(rows["rows"]) == 0, "a rank with rows has failed"
        return None
    finally:
        hook.remove()
    return engine.update(rows, policy_loss, POLICY)


def update_with_overflow(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    """The first step overflows float16 on the ranks with rows."""

    def loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
        term, metrics = policy_loss(values, micro, counts)
        return term * (1e6 if step == 0 else 1.0), metrics

    return engine.update(rows, loss, POLICY)


def update_with_nan(engine: FsdpEngine, rows: TensorDict, step: int) -> Any:
    """The gradient of the first step is NaN."""

    def loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
        term, metrics = policy_loss(values, micro, counts)
        return term * (float("nan") if step == 0 else 1.0), metrics

    try:
        return engine.update(rows, loss, POLICY)
    except FloatingPointError:
        return None


CASES: dict[str, tuple[Callable[..., FsdpEngine], Step, dict[str, Any]]] = {
    "a tied weight": (make_policy, update, {}),
    "checkpointing": (make_policy, update, {"gradient_checkpointing": True}),
    "an adapter": (make_policy, update, {"lora": True}),
    "sequence parallelism": (make_policy, update, {"sp": 2}),
    "an unused layer": (make_bigram, update_bigram, {}),
    "two losses": (make_policy, update_on_two_losses, {}),
    "two halves": (make_policy, step_in_two_halves, {}),
    "float16": (make_policy, update_with_overflow, {"compute_dtype": "float16"}),
    "a gradient of NaN": (make_policy, update_with_nan, {}),
}
"""Name -> engine, step, and settings."""

FAILURE = "a failure in the backward pass"
"""Case of two ranks, both of which have rows and fail, but at different layers."""


def train(case: str, group: ProcessGroup, *, overlaps: bool) -> dict[str, Any]:
    make, step, settings = CASES.get(case, (make_policy, update_after_a_failure, {}))
    engine = make(group, **settings, overlap_all_reduce=overlaps)
    sp = settings.get("sp", 1)
    index = torch.tensor(ROWS[group.size() // sp][group.rank() // sp], dtype=torch.int64)
    reports = []
    for seed in range(NUM_STEPS):
        report = step(engine, take_rows(table(11, seed=seed), index), seed)
        # The loss is that of the rows of this rank.
        reports.append(report and {name: metric.result() for name, metric in report.items() if name != "loss"})
    scale = engine.steps.loss_scale
    return {
        "weights": {name: weight.detach() for name, weight in engine.model.named_parameters()},
        "reports": reports,
        "scale": None if scale is None else (scale.factor, scale.good_steps),
    }


class Operations(TorchDispatchMode):
    """Records the operations of the backward pass of embeddings, which is its last one, and all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        name = func.overloadpacket.__name__
        if name in ("allreduce_", "embedding_dense_backward"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations(group: ProcessGroup, *, overlaps: bool) -> list[str]:
    """Returns the recorded operations of a step."""
    engine = make_policy(group, overlap_all_reduce=overlaps)
    rows = take_rows(table(11), torch.tensor(ROWS[2][group.rank()]))
    with Operations() as recorded:
        engine.update(rows, policy_loss, POLICY)
    return recorded.names


@contextmanager
def small_buckets() -> Iterator[None]:
    original, gradients.BUCKET_BYTES = gradients.BUCKET_BYTES, BUCKET_BYTES
    try:
        yield
    finally:
        gradients.BUCKET_BYTES = original


def main(rank: int, folder: Path) -> None:
    """Joins the other ranks through a file and writes the results of this rank: (ranks, case, overlap) -> result."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    groups = {size: distributed.new_group(list(range(size))) for size in (2, 4)}
    results: dict[Any, Any] = {}
    with small_buckets():
        for size, group in groups.items():
            if rank >= size:
                continue
            assert isinstance(group, ProcessGroup)
            for case in (*CASES, *([FAILURE] if size == 2 else [])):
                for overlaps in (False, True):
                    results[size, case, overlaps] = train(case, group, overlaps=overlaps)
            if size == 2:
                results["operations"] = [operations(group, overlaps=overlaps) for overlaps in (False, True)]
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
