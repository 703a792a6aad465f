"""Program of two stages that load models of every kind, and train them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from flowrl.config import ActorConfig, CriticConfig, ModelKind, RewardModelConfig
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.data.metric import merge_metrics
from flowrl.engines.train.base import Denominators, Outputs, TrainContext, load_train_engine_class
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.engines.train.pipeline.stage_schedule import StagePass
from tests.engines.strategies import POLICY, VALUES, critic_loss, policy_loss
from tests.engines.tables import VOCABULARY, table

NUM_LAYERS = 4
SCORES = Outputs(("scores",), "response_mask")


def score_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
    return (values["scores"] ** 2).sum() / counts.rows, {}


LOSSES: dict[ModelKind, tuple[Any, Any, Outputs]] = {
    "policy": (ActorConfig, policy_loss, POLICY),
    "critic": (CriticConfig, critic_loss, VALUES),
    "reward_model": (RewardModelConfig, score_loss, SCORES),
}
"""Kind of a model -> class of its settings, loss, and outputs of the loss."""

ALL = Outputs(("logprobs", "entropy", "topk_logprobs", "topk_ids", "hidden"), topk=3)


def start(kind: ModelKind, model: Path, group: ProcessGroup | None = None, **settings: Any) -> FsdpEngine:
    """Returns the included engine, with a stage per rank of `group`."""
    config = LOSSES[kind][0].model_validate(
        {
            "model": {"path": model, "dtype": "float64"},
            "optimizer": {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 0.5},
            "engine": {"max_tokens_per_microbatch": 24},
            **({"head": "fresh"} if kind != "policy" else {}),
            **settings,
        }
    )
    pp = 1 if group is None else group.size()
    context = TrainContext(kind, config, torch.device("cpu"), group, pp=pp)
    engine = load_train_engine_class("fsdp", pp=pp).start(context)
    assert isinstance(engine, FsdpEngine)
    return engine


def results(kind: ModelKind, engine: FsdpEngine) -> dict[str, Any]:
    _, loss, outputs = LOSSES[kind]
    held = sum(weight.numel() for weight in engine.model.parameters())
    before = engine.forward(table(11), ALL if kind == "policy" else outputs)
    steps = []
    for step in range(2):
        metrics = [engine.forward_backward(table(11, seed=step), loss, outputs, is_last=True), engine.optim_step()]
        steps.append({name: metric.result() for name, metric in merge_metrics(metrics).items()})
    measured = engine.measure(table(11), loss, outputs)
    return {
        "held": held,
        "before": before,
        "steps": steps,
        "measured": {name: metric.result() for name, metric in measured.items()},
        "weights": {name: weight.clone() for name, weight in engine.export_weights()},
        "files": engine.describe_model(),
        "architecture": engine.architecture,
        "num_embeddings": engine.num_embeddings,
        "usage": engine.pop_usage(),
    }


ADAPTERS: dict[str, dict[str, Any]] = {
    "adapter": {"rank": 4, "targets": ["q_proj", "down_proj"]},
    "adapter and tied head": {"rank": 4, "targets": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]},
}


def adapter_results(engine: FsdpEngine) -> dict[str, Any]:
    """Returns the results of a policy with an adapter, and the exported adapter."""
    found = results("policy", engine)
    return found | {"exported": {name: weight.clone() for name, weight in engine.export_adapter()}}


def recorded_passes(engine: FsdpEngine) -> list[StagePass]:
    """Returns the passes of this stage in a training step, in the order in which they begin."""
    kinds: list[Any] = []
    weight = next(weight for weight in engine.model.parameters() if weight.ndim == 2)
    hooks = [
        engine.model.register_forward_pre_hook(lambda *_: kinds.append("forward")),
        weight.register_hook(lambda _: kinds.append("backward")),
    ]
    engine.update(table(40), policy_loss, POLICY)
    for hook in hooks:
        hook.remove()
    return [StagePass(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]


class SavedBytes:
    """Bytes of the activations that autograd keeps for backward passes."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def save(self, tensor: Tensor) -> "Tensor | _Saved":
        return tensor if isinstance(tensor, nn.Parameter) else _Saved(tensor, self)


class _Saved:
    """A saved tensor, which counts until autograd frees it."""

    def __init__(self, tensor: Tensor, saved: SavedBytes) -> None:
        self.tensor, self._saved = tensor, saved
        saved.now += tensor.nbytes
        saved.peak = max(saved.peak, saved.now)

    def __del__(self) -> None:
        self._saved.now -= self.tensor.nbytes


def peak_of_saved(engine: FsdpEngine, num_micros: int) -> int:
    """Returns the largest number of bytes that a training step over equal micro-batches of two rows keeps."""
    lengths_B = torch.full((2 * num_micros,), 12)
    generator = torch.Generator().manual_seed(0)
    tokens = {
        "input_ids": torch.randint(2, VOCABULARY, (int(lengths_B.sum()),), generator=generator),
        "response_mask": torch.ones(int(lengths_B.sum()), dtype=torch.bool),
        "weight": torch.ones(int(lengths_B.sum()), dtype=torch.float64),
    }
    rows = make_tensordict({"prompt_id": torch.arange(2 * num_micros)}, tokens, lengths_B, 2 * num_micros)
    saved = SavedBytes()
    with saved_tensors_hooks(saved.save, lambda kept: kept.tensor if isinstance(kept, _Saved) else kept):
        engine.update(rows, policy_loss, POLICY)
    assert saved.now == 0, "the step has freed its activations"
    return saved.peak


def main(rank: int, folder: Path) -> None:
    """Each stage reads a copy of the models in which the layers of the other stage have NaN."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = distributed.group.WORLD
    assert isinstance(group, ProcessGroup)
    found: dict[str, Any] = {}
    for kind in LOSSES:
        found[kind] = results(kind, start(kind, folder / f"stage {rank}", group))
    policy = start("policy", folder / f"stage {rank}", group)
    found["passes"] = recorded_passes(policy)
    found["saved"] = [peak_of_saved(policy, num_micros) for num_micros in (1, 8)]
    for name, lora in ADAPTERS.items():
        found[name] = adapter_results(start("policy", folder / f"stage {rank}", group, lora=lora))
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()
