"""Rank processes of the strategy tests: the same optimizer steps of a real model under every strategy."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowrl.config import EngineConfig, LoraConfig, OptimizerConfig, RolloutConfig
from flowrl.data.metric import Mean, Metric
from flowrl.devices import device as devices
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.models.adapters.lora import adapter_state, add_adapter
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.models.weight_samples import WeightSample, weight_samples
from flowrl.engines.models.weights import meta_copy
from flowrl.engines.parallel.pipeline_mesh import PipelineMesh, pipeline_mesh
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh, rank_mesh
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import Compute, PolicyModel, policy_outputs, value_outputs
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.engines.train.pipeline.engine import PipelineEngine
from tests.devices.recorded_device import RecordedDevice
from tests.engines.losses import weighted_loss
from tests.engines.tables import table, take_rows
from tests.engines.tiny import llama, qwen2, qwen3_moe, to_float64, tokenizer

NUM_STEPS = 3
LORA = LoraConfig(rank=4, alpha=8.0)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    """A parallelism of a model over a number of ranks."""

    ranks: int
    settings: dict
    tp: int = 1
    sp: int = 1
    pp: int = 1
    num_layers: int = 2
    lora: bool = False
    slow: bool = False
    """True if faster cases test each of its features."""
    dtype: torch.dtype = torch.float64
    kind: str = "adamw"
    """Optimizer."""
    experts: bool = False
    """Whether the policy is a mixture of experts, trained with its auxiliary loss."""

    @property
    def optimizer(self) -> OptimizerConfig:
        return OPTIMIZER.model_copy(update={"kind": self.kind})

    @property
    def num_peers(self) -> int:
        """Number of ranks of a stage that share rows."""
        return self.tp * self.sp

    @property
    def num_row_parts(self) -> int:
        """Number of data-parallel ranks."""
        return self.ranks // (self.num_peers * self.pp)

    def rows(self, rank: int) -> list[int]:
        return ROWS[self.num_row_parts][rank // self.num_peers % self.num_row_parts]

    @property
    def leaders(self) -> list[int]:
        """Ranks whose outputs and metrics the controller reads."""
        return list(range(self.ranks - self.ranks // self.pp, self.ranks, self.num_peers))


SPLIT = {"strategy": "fsdp", "sequence_parallel_norms": True}
DIVIDED = {"strategy": "fsdp", "expert_parallel": True}

ROUTER_LOSS = 0.1
"""Coefficient of the auxiliary loss."""

CASES = {
    "fsdp on 1": Case(1, {"strategy": "fsdp"}),
    "fsdp on 1, float32": Case(1, {"strategy": "fsdp"}, dtype=torch.float32),
    "fsdp on 1, parameters on the CPU": Case(1, {"strategy": "fsdp", "offload": "parameters"}, slow=True),
    "fsdp on 1, optimizer on the CPU": Case(1, {"strategy": "fsdp", "offload": "optimizer"}, slow=True),
    "fsdp on 1, checkpointed": Case(1, {"strategy": "fsdp", "gradient_checkpointing": True}, slow=True),
    "lora, fsdp on 1": Case(1, {"strategy": "fsdp"}, lora=True, slow=True),
    "lora, fsdp on 1, checkpointed": Case(
        1, {"strategy": "fsdp", "gradient_checkpointing": True}, lora=True, slow=True
    ),
    "ddp on 2": Case(2, {"strategy": "ddp"}),
    "ddp on 4": Case(4, {"strategy": "ddp"}, slow=True),
    "zero1 on 2": Case(2, {"strategy": "zero1"}),
    "zero1 on 4": Case(4, {"strategy": "zero1"}, slow=True),
    "zero1 on 2, optimizer on the CPU": Case(2, {"strategy": "zero1", "offload": "optimizer"}, slow=True),
    "sp x zero1 on 2 x 2": Case(4, {"strategy": "zero1"}, sp=2, slow=True),
    "lora, zero1 on 2": Case(2, {"strategy": "zero1"}, lora=True, slow=True),
    "muon, zero1 on 4": Case(4, {"strategy": "zero1"}, kind="muon", slow=True),
    "fsdp on 2": Case(2, {"strategy": "fsdp"}),
    "fsdp on 4": Case(4, {"strategy": "fsdp"}, slow=True),
    "fsdp on 2, not resharded": Case(2, {"strategy": "fsdp", "reshard_after_forward": False}, slow=True),
    "fsdp on 2, parameters on the CPU": Case(2, {"strategy": "fsdp", "offload": "parameters"}, slow=True),
    "fsdp on 2, optimizer on the CPU": Case(2, {"strategy": "fsdp", "offload": "optimizer"}, slow=True),
    "fsdp on 4, padded": Case(4, {"strategy": "fsdp", "packing": "never"}, slow=True),
    "fsdp on 2, checkpointed": Case(2, {"strategy": "fsdp", "gradient_checkpointing": True}, slow=True),
    "hybrid on 2 x 2, optimizer on the CPU": Case(
        4, {"strategy": "fsdp", "shard_ranks": 2, "offload": "optimizer"}, slow=True
    ),
    "tp on 2": Case(2, {}, tp=2, slow=True),
    "tp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, tp=2),
    "tp x fsdp on 2 x 2, float32": Case(4, {"strategy": "fsdp"}, tp=2, dtype=torch.float32, slow=True),
    "tp x fsdp on 2 x 2, checkpointed": Case(4, {"strategy": "fsdp", "gradient_checkpointing": True}, tp=2, slow=True),
    "tp on 2, norms split, padded": Case(2, {**SPLIT, "packing": "never"}, tp=2, slow=True),
    "tp x fsdp on 2 x 2, norms split, checkpointed": Case(
        4, {**SPLIT, "gradient_checkpointing": True}, tp=2, slow=True
    ),
    "sp x tp on 2 x 2, norms split": Case(4, SPLIT, sp=2, tp=2, slow=True),
    "sp on 2": Case(2, {"strategy": "ddp"}, sp=2, slow=True),
    "sp on 4, more than heads of keys": Case(4, {"strategy": "ddp"}, sp=4),
    "sp on 2, padded": Case(2, {"strategy": "ddp", "packing": "never"}, sp=2, slow=True),
    "sp x ddp on 2 x 2": Case(4, {"strategy": "ddp"}, sp=2, slow=True),
    "sp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, sp=2, slow=True),
    "sp x tp on 2 x 2": Case(4, {"strategy": "fsdp"}, sp=2, tp=2, slow=True),
    "lora, ddp on 2": Case(2, {"strategy": "ddp"}, lora=True, slow=True),
    "lora, fsdp on 2": Case(2, {"strategy": "fsdp"}, lora=True, slow=True),
    "lora, fsdp on 4, checkpointed": Case(
        4, {"strategy": "fsdp", "gradient_checkpointing": True}, lora=True, slow=True
    ),
    "lora, hybrid on 2 x 2": Case(4, {"strategy": "fsdp", "shard_ranks": 2}, lora=True, slow=True),
    "lora, sp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, sp=2, lora=True, slow=True),
    "lora, tp on 2": Case(2, {}, tp=2, lora=True, slow=True),
    "lora, tp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, tp=2, lora=True, slow=True),
    "lora, tp x fsdp on 2 x 2, checkpointed": Case(
        4, {"strategy": "fsdp", "gradient_checkpointing": True}, tp=2, lora=True, slow=True
    ),
    "lora, tp x fsdp on 2 x 2, norms split": Case(4, SPLIT, tp=2, lora=True, slow=True),
    "lora, sp x tp on 2 x 2": Case(4, {"strategy": "fsdp"}, sp=2, tp=2, lora=True, slow=True),
    "experts, ddp on 2": Case(2, {"strategy": "ddp"}, experts=True, slow=True),
    "experts, ddp on 2, one pass": Case(
        2, {"strategy": "ddp", "max_tokens_per_microbatch": 1000}, experts=True, slow=True
    ),
    "experts, fsdp on 2, checkpointed": Case(
        2, {"strategy": "fsdp", "gradient_checkpointing": True}, experts=True, slow=True
    ),
    "experts, fsdp on 4": Case(4, {"strategy": "fsdp"}, experts=True),
    "experts, sp x ddp on 2 x 2": Case(4, {"strategy": "ddp"}, sp=2, experts=True, slow=True),
    "experts, tp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, tp=2, experts=True, slow=True),
    "experts, lora, fsdp on 2": Case(2, {"strategy": "fsdp"}, lora=True, experts=True, slow=True),
    "divided experts, fsdp on 1": Case(1, DIVIDED, experts=True, slow=True),
    "divided experts, fsdp on 2": Case(2, DIVIDED, experts=True),
    "divided experts, fsdp on 2, padded": Case(2, {**DIVIDED, "packing": "never"}, experts=True, slow=True),
    "divided experts, fsdp on 2, checkpointed": Case(
        2, {**DIVIDED, "gradient_checkpointing": True}, experts=True, slow=True
    ),
    "divided experts, fsdp on 2, optimizer on the CPU": Case(
        2, {**DIVIDED, "offload": "optimizer"}, experts=True, slow=True
    ),
    "divided experts, fsdp on 4": Case(4, DIVIDED, experts=True),
    "divided experts, hybrid on 2 x 2": Case(4, {**DIVIDED, "shard_ranks": 2}, experts=True, slow=True),
    "divided experts, sp x fsdp on 2 x 2": Case(4, DIVIDED, sp=2, experts=True, slow=True),
    "divided experts, tp x fsdp on 2 x 2": Case(4, DIVIDED, tp=2, experts=True, slow=True),
    "divided experts, lora, fsdp on 2": Case(2, DIVIDED, lora=True, experts=True, slow=True),
    "muon, ddp on 2": Case(2, {"strategy": "ddp"}, kind="muon", slow=True),
    "muon, fsdp on 1": Case(1, {"strategy": "fsdp"}, kind="muon", slow=True),
    "muon, fsdp on 2": Case(2, {"strategy": "fsdp"}, kind="muon", slow=True),
    "muon, fsdp on 2, optimizer on the CPU": Case(
        2, {"strategy": "fsdp", "offload": "optimizer"}, kind="muon", slow=True
    ),
    "muon, fsdp on 2, parameters on the CPU": Case(
        2, {"strategy": "fsdp", "offload": "parameters"}, kind="muon", slow=True
    ),
    "muon, fsdp on 4": Case(4, {"strategy": "fsdp"}, kind="muon", slow=True),
    "muon, hybrid on 2 x 2": Case(4, {"strategy": "fsdp", "shard_ranks": 2}, kind="muon", slow=True),
    "muon, tp on 2": Case(2, {}, tp=2, kind="muon", slow=True),
    "muon, tp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, tp=2, kind="muon"),
    "muon, tp x fsdp on 2 x 2, float32": Case(
        4, {"strategy": "fsdp"}, tp=2, kind="muon", dtype=torch.float32, slow=True
    ),
    "muon, tp x hybrid on 2 x 1 x 2, norms split": Case(4, {**SPLIT, "shard_ranks": 1}, tp=2, kind="muon", slow=True),
    "muon, sp x tp on 2 x 2": Case(4, {"strategy": "fsdp"}, sp=2, tp=2, kind="muon", slow=True),
    "pp on 2": Case(2, {}, pp=2, num_layers=5),
    "pp on 2, float32": Case(2, {}, pp=2, num_layers=5, dtype=torch.float32, slow=True),
    "pp on 2, padded, checkpointed": Case(
        2, {"packing": "never", "gradient_checkpointing": True}, pp=2, num_layers=5, slow=True
    ),
    "pp on 4": Case(4, {}, pp=4, num_layers=5, slow=True),
    "pp x fsdp on 2 x 1": Case(2, {"strategy": "fsdp"}, pp=2, num_layers=5, slow=True),
    "pp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, pp=2, num_layers=5),
    "pp x fsdp on 2 x 2, float32": Case(4, {"strategy": "fsdp"}, pp=2, num_layers=5, dtype=torch.float32, slow=True),
    "pp x fsdp on 2 x 2, checkpointed": Case(
        4, {"strategy": "fsdp", "gradient_checkpointing": True}, pp=2, num_layers=5, slow=True
    ),
    "pp x fsdp on 2 x 2, parameters on the CPU": Case(
        4, {"strategy": "fsdp", "offload": "parameters"}, pp=2, num_layers=5, slow=True
    ),
    "pp x fsdp on 2 x 2, optimizer on the CPU": Case(
        4, {"strategy": "fsdp", "offload": "optimizer"}, pp=2, num_layers=5, slow=True
    ),
    "pp x ddp on 2 x 2": Case(4, {"strategy": "ddp"}, pp=2, num_layers=5, slow=True),
    "pp x ddp on 2 x 2, overlapped": Case(
        4, {"strategy": "ddp", "overlap_all_reduce": True}, pp=2, num_layers=5, slow=True
    ),
    "pp x zero1 on 2 x 2": Case(4, {"strategy": "zero1"}, pp=2, num_layers=5, slow=True),
    "pp x tp on 2 x 2": Case(4, {}, pp=2, tp=2, num_layers=5, slow=True),
    "pp x sp on 2 x 2": Case(4, {"strategy": "ddp"}, pp=2, sp=2, num_layers=5, slow=True),
    "lora, pp on 2": Case(2, {}, pp=2, num_layers=5, lora=True, slow=True),
    "lora, pp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, pp=2, num_layers=5, lora=True, slow=True),
    "muon, pp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, pp=2, num_layers=5, kind="muon", slow=True),
}

ROWS = {
    1: [list(range(11))],
    2: [[0, 2, 4, 6, 8, 10, 1, 3], [5, 7, 9]],
    4: [[0, 1], [2, 3, 4, 5, 6, 7, 8], [], [9, 10]],
}
"""Rows of each rank by number of data-parallel ranks; one of four ranks has none."""


POLICY = Outputs(("logprobs", "entropy"), "response_mask", 0.7)
VALUES = Outputs(("values",), "response_mask")


def policy_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
    return weighted_loss(values["logprobs"] + 0.1 * values["entropy"], micro, counts)


def critic_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
    return weighted_loss(values["values"] ** 2, micro, counts)


def train(case: Case, group: distributed.ProcessGroup | None, folder: Path | None = None) -> dict[str, Any]:
    """Trains a policy and a critic for three steps and returns outputs, metrics and weights.

    Saves the policy in `folder`, if given, before a fourth step.
    """
    rank = 0 if group is None else group.rank()
    rows = case.rows(rank)
    mesh = SINGLE_PROCESS if group is None else _mesh(case, group)
    policy = policy_of(case, mesh)
    backbone = llama(num_hidden_layers=case.num_layers).model
    if case.dtype == torch.float64:
        to_float64(backbone)
    critic = CriticModel(backbone)
    if case.lora:
        add_adapter(critic.backbone, LORA)
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    critic = make_engine(case, critic, value_outputs, mesh)
    first = take_rows(table(11), torch.tensor(rows, dtype=torch.int64))
    results: dict[str, Any] = {
        "logprobs": _reference_logprobs(policy, first),
        "values": critic.forward(first, Outputs(("values",)))["values"],
    }
    results["still gathered"] = sum(not isinstance(p, DTensor) for p in policy.model.parameters())
    reports, losses = [], []
    for step in range(NUM_STEPS):
        part = take_rows(table(11, seed=step), torch.tensor(rows, dtype=torch.int64))
        roles = (("policy", policy, policy_loss, POLICY), ("critic", critic, critic_loss, VALUES))
        for name, trained, loss, outputs in roles:
            report = trained.update(part, loss, outputs)
            reports.append((name, {n: m.result() for n, m in report.items() if n in ("grad_norm", "lr")}))
            losses.append(report.get("loss", Mean(0.0, 0)))
    results["reports"], results["losses"] = reports, losses
    policy.offload()  # before exports, because memory that NumPy reads cannot be released
    results["held while idle"] = held_bytes(policy)
    results["num_moments"] = sum(moment.numel() for moment in moments_of(policy))
    policy.onload()
    if case.lora:
        results["reference"] = _reference_logprobs(policy, first)
        results["adapter"] = adapter_state(policy.model.get_submodule("language_model"))
    index, count = policy.weight_part
    names = [name for name, *_ in policy.weight_shapes()]
    parts = () if index is None or count == 1 else policy.export_part(names)
    results["part"] = index, count, {name: part.clone() for name, part in zip(names, parts, strict=False)}
    results["policy"], results["critic"] = exported(policy), exported(critic)
    results["wrong samples"] = _wrong_samples(policy)
    if case.pp == 1:
        results["generated"] = _generated(policy.language_model)
    if folder is not None:
        checkpoints = EngineCheckpoints(policy)
        checkpoints.save(folder)
        checkpoints.result()
    results["later"] = fourth_step(policy, rows)
    if folder is not None:
        distributed.barrier(group)  # only rank 0 writes the index
        load(policy, folder)
        results["resumed"] = fourth_step(policy, rows)
    results["num_held"] = sum(_local_shard(parameter).numel() for parameter in policy.model.parameters())
    return results


def held_bytes(engine: FsdpEngine) -> int:
    """Returns the bytes of the weights and of the optimizer state of this rank."""
    moments = moments_of(engine)
    assert moments, "the engine has taken a step"
    return sum(_local_shard(x).untyped_storage().nbytes() for x in (*engine.model.parameters(), *moments))


def moments_of(engine: FsdpEngine) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    return [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]


def policy_of(case: Case, mesh: RankMesh | PipelineMesh) -> FsdpEngine:
    """Returns an engine with an untrained policy."""
    language_model = qwen3_moe() if case.experts else qwen2(num_hidden_layers=case.num_layers)
    if case.dtype == torch.float64:
        to_float64(language_model)
    if case.lora:
        add_adapter(language_model, LORA)
    return make_engine(case, PolicyModel(language_model), policy_outputs, mesh)


def make_engine(case: Case, model: nn.Module, compute: Compute, mesh: RankMesh | PipelineMesh) -> FsdpEngine:
    settings = {name: value for name, value in case.settings.items() if name != "expert_parallel" or case.experts}
    if isinstance(model, CriticModel):  # dense
        settings.pop("expert_parallel", None)
    engine = EngineConfig.model_validate({"max_tokens_per_microbatch": 20, **settings})
    if isinstance(mesh, PipelineMesh):
        return PipelineEngine(model, compute, case.optimizer, engine, mesh=mesh)
    return FsdpEngine(model, compute, case.optimizer, engine, mesh=mesh, router_loss_coef=ROUTER_LOSS)


def exported(engine: FsdpEngine) -> dict[str, Tensor]:
    """Returns a copy of the full weights."""
    return {name: weight.clone() for name, weight in engine.export_weights()}


def fourth_step(policy: FsdpEngine, rows: list[int]) -> dict[str, torch.Tensor]:
    """Takes a fourth step and returns the weights."""
    policy.update(take_rows(table(11, seed=NUM_STEPS), torch.tensor(rows, dtype=torch.int64)), policy_loss, POLICY)
    return exported(policy)


def _reference_logprobs(policy: FsdpEngine, rows: TensorDict) -> torch.Tensor:
    outputs = Outputs(("logprobs",), "response_mask", 0.7, without_adapter=True)
    return policy.forward(rows, outputs)["logprobs"]


def _wrong_samples(policy: FsdpEngine) -> list[str]:
    """Returns the weights whose samples are not bitwise slices of the exported weights."""
    weights = exported(policy)
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    # Every rank of one stage can return the samples. Otherwise, only rank 0 does.
    is_divided = isinstance(policy, PipelineEngine)
    take = policy.weight_samples if is_divided else partial(weight_samples, policy.language_model)
    samples = [sample for version in range(3) for sample in take(version).samples]
    assert samples or (is_divided and policy.group is not None and policy.group.rank() > 0)

    def expected(sample: WeightSample) -> torch.Tensor:
        weight = (tied | weights)[sample.name]
        return weight if sample.kind == "plain" else weight[:, list(sample.inputs)].T

    return [sample.name for sample in samples if not torch.equal(expected(sample), sample.values)]


def _local_shard(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _mesh(case: Case, group: distributed.ProcessGroup) -> RankMesh | PipelineMesh:
    shard_ranks = case.settings.get("shard_ranks")
    if case.pp > 1:
        return pipeline_mesh(group, device="cpu", pp=case.pp, tp=case.tp, sp=case.sp, shard_ranks=shard_ranks)
    divides = case.settings.get("expert_parallel", False)
    return rank_mesh(group, device="cpu", tp=case.tp, sp=case.sp, shard_ranks=shard_ranks, expert_parallel=divides)


def _generated(model: PreTrainedModel) -> list[list[int]]:
    """Returns tokens sampled with weights that are gathered for the call."""
    rollout = HfRollout(meta_copy(model), tokenizer(), RolloutConfig(max_response_tokens=6), gathered_from=model)
    responses = rollout.generate(make_requests([[3, 4], [5]], torch.arange(2), torch.zeros(2).long(), seed=0))
    assert all(parameter.is_meta for parameter in rollout.model.parameters())
    return [response.token_ids for response in responses]


def train_on_bfloat16(group: distributed.ProcessGroup | None) -> list[dict[str, torch.Tensor]]:
    """Trains a float32 adapter in a bfloat16 model, so that FSDP2 gathers two dtypes; returns it after each step.

    Every row is a micro-batch, so all ranks run the kernels of a single process.
    """
    model = qwen2(torch.bfloat16)
    add_adapter(model, LORA)
    mesh = SINGLE_PROCESS if group is None else rank_mesh(group, device="cpu")
    settings = EngineConfig(strategy="single" if group is None else "fsdp", max_tokens_per_microbatch=1)
    engine = FsdpEngine(PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-2, eps=1e-3), settings, mesh=mesh)
    rows = torch.arange(11) if group is None else torch.arange(group.rank(), 11, 2)
    states = []
    for step in range(NUM_STEPS):
        engine.update(take_rows(table(11, seed=step), rows), policy_loss, POLICY)
        states.append(adapter_state(model))
    return states


def train_in_half(
    dtype: str,
    group: distributed.ProcessGroup | None,
    *,
    strategy: str = "fsdp",
    pp: int = 1,
    weights: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Trains a policy with half-precision compute; returns norms, skipped steps, loss scale and weights."""
    settings = {"strategy": "single" if group is None else strategy, "compute_dtype": dtype}
    case = Case(1 if group is None else group.size(), settings, pp=pp, dtype=weights)
    policy = policy_of(case, SINGLE_PROCESS if group is None else _mesh(case, group))
    num_parts = case.num_row_parts
    rows = torch.arange(0 if group is None else group.rank() % num_parts, 11, num_parts)
    # The same rows in each step, so that skipped steps do not change the later ones.
    reports = [policy.update(take_rows(table(11), rows), policy_loss, POLICY) for _ in range(NUM_STEPS + 2)]
    scale = policy.steps.loss_scale
    return {
        "norms": [report["grad_norm"].result() for report in reports if "grad_norm" in report],
        "skipped": sum(report["skipped_update"].result() for report in reports),
        "scale": None if scale is None else (scale.factor, scale.good_steps),
        "weights": exported(policy),
    }


class Weight(nn.Module):
    """A weight of four bfloat16 values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


SUMS = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}, "tp": {"strategy": "fsdp"}}
"""Strategy -> engine settings of `norm_of_a_sum` on two ranks."""


def norm_of_a_sum(strategy: str, group: distributed.ProcessGroup | None) -> float:
    """Returns the gradient norm of a step of 21 micro-batches per rank, whose gradients are 256, 1, 1, ..., 1.

    A sum in bfloat16 remains 256, because the next larger number is 258.
    """
    mesh = SINGLE_PROCESS if group is None else rank_mesh(group, device="cpu", tp=2 if strategy == "tp" else 1)
    settings = EngineConfig.model_validate(SUMS.get(strategy, {}) | {"max_tokens_per_microbatch": 1})
    factors = itertools.chain([256.0], itertools.repeat(1.0))

    def outputs(model: nn.Module, micro: MicroBatch, _: Outputs) -> dict[str, Tensor]:
        return {"scores": model(next(factors)).expand(len(micro.mask))}

    def total(values: Mapping[str, Tensor], *_: object) -> tuple[Tensor, dict[str, Metric]]:
        return values["scores"].sum(), {}

    rows = table(21)
    rows["tokens", "response_mask"] = torch.ones_like(rows["tokens", "response_mask"])

    engine = FsdpEngine(Weight(), outputs, OptimizerConfig(lr=1e-3), settings, mesh=mesh)
    metrics = engine.update(rows, total, Outputs(("scores",), "response_mask"))
    return metrics["grad_norm"].result()


def train_with_moves(group: distributed.ProcessGroup, *, moves: bool) -> list[torch.Tensor]:
    """Trains bfloat16 weights for three steps of two batches, and returns the weights.

    With `moves`, the engine is idle after each batch and after each step.
    """
    engine = EngineConfig(strategy="fsdp", max_tokens_per_microbatch=20)
    policy = FsdpEngine(
        PolicyModel(qwen2(torch.bfloat16)), policy_outputs, OPTIMIZER, engine, mesh=rank_mesh(group, device="cpu")
    )
    for step in range(NUM_STEPS):
        for seed in (step, step + 1):
            policy.forward_backward(table(11, seed=seed), policy_loss, POLICY)
            if moves:
                _leave_and_return(policy)
        policy.optim_step()
        if moves:
            _leave_and_return(policy)
    return [_local_shard(parameter).detach().clone() for parameter in policy.model.parameters()]


def _leave_and_return(engine: FsdpEngine) -> None:
    engine.offload()
    engine.onload()


def main(rank: int, folder: Path, names: Collection[str]) -> None:
    """Runs the named cases and the half-precision cases on one of four ranks, and writes the results."""
    torch.set_num_threads(1)
    devices._CPU = RecordedDevice(devices._CPU, lambda _: None)  # pyright: ignore (idle engines release memory)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    groups = {size: distributed.new_group(list(range(size))) for size in (4, 2, 1)}
    results = {}
    for name, case in CASES.items():
        if name in names and rank < case.ranks:
            group = groups[case.ranks]
            assert isinstance(group, distributed.ProcessGroup)
            results[name] = train(case, group, folder / name if case.ranks == 4 else None)
    if rank < 2:
        group = groups[2]
        assert isinstance(group, distributed.ProcessGroup)
        results["bfloat16"] = train_on_bfloat16(group)
        results |= {f"sum with {strategy}": norm_of_a_sum(strategy, group) for strategy in SUMS}
        results |= {f"in {dtype}": train_in_half(dtype, group) for dtype in ("bfloat16", "float16")}
        results |= {
            f"in {dtype} on stages with {strategy}": train_in_half(dtype, group, strategy=strategy, pp=2)
            for dtype in ("bfloat16", "float16")
            for strategy in ("ddp", "fsdp")
        }
        mixed = train_in_half("float16", group, strategy="ddp", pp=2, weights=torch.bfloat16)
        results["in float16 over bfloat16 on stages"] = mixed
        results["moves"] = {moves: train_with_moves(group, moves=moves) for moves in (False, True)}
    if rank == 0:
        assert isinstance(groups[1], distributed.ProcessGroup)
        results["moves on 1"] = {moves: train_with_moves(groups[1], moves=moves) for moves in (False, True)}
        results |= {f"in {dtype} on 1": train_in_half(dtype, groups[1]) for dtype in ("bfloat16", "float16")}
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
