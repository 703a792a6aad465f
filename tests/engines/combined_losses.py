"""Gradients of token, pair and group losses and of their combinations, also as a program of several ranks."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from torch.nn.functional import logsigmoid

from flowrl.algorithms import dpo_loss, sequence_logprobs
from flowrl.config import EngineConfig, OptimizerConfig, PreferenceActorConfig
from flowrl.data.batch.block import split_evenly, split_groups
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.models.parameters import to_full_tensor
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.workers import PTX, Actor, Loss
from flowrl.workers.losses.loss import BoundLoss
from flowrl.workers.losses.preference_losses import preference_loss
from tests.engines.tables import VOCABULARY, take_rows
from tests.engines.tiny import qwen2, to_float64

TEMPERATURE = 0.7
PAIRS = [3, 0, 1, 3, 4, 0, 2, 1, 4, 2, 5, 5]
"""Pair of each row. The first row of a pair is the chosen one."""


def rows(num_rows: int, seed: int) -> TensorDict:
    """Returns rows of 2 to 12 tokens with the columns of all losses. The last pair has no trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, 13, (num_rows,), generator=generator)
    total, starts_B = int(lengths_B.sum()), torch.cumsum(lengths_B, 0) - lengths_B
    mask = torch.rand(total, generator=generator) < 0.7
    mask[starts_B] = False
    mask[starts_B[10] if num_rows > 10 else total :] = False
    tokens = {
        "input_ids": torch.randint(2, VOCABULARY, (total,), generator=generator),
        "response_mask": mask,
        "weight": torch.rand(total, generator=generator, dtype=torch.float64),
        "ref_logprobs": -3 * torch.rand(total, generator=generator, dtype=torch.float64),
        "teacher_ids": torch.randint(0, VOCABULARY, (total, 3), generator=generator, dtype=torch.int32),
        "teacher_logprobs": -3 * torch.rand(total, 3, generator=generator, dtype=torch.float64),
    }
    columns = {"pair": torch.tensor(PAIRS[:num_rows]), "third": torch.arange(num_rows) % 3}
    columns["ref_response_logprobs"] = -9 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
    columns["desirable"] = torch.arange(num_rows) % 3 == 1
    columns["reference_kl"] = torch.full((num_rows,), 0.25, dtype=torch.float64)
    columns["third_size"] = torch.bincount(columns["third"], minlength=3)[columns["third"]]
    return make_tensordict(columns, tokens, lengths_B, num_rows)


def weighted(logprobs: Tensor, entropy: Tensor, weight: Tensor) -> Tensor:
    return -logprobs * weight - 0.1 * entropy


def dpo(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    sums_B = [sequence_logprobs(values, mask, mode="sum") for values in (logprobs, ref_logprobs)]
    (chosen, rejected), (ref_chosen, ref_rejected) = (sum_B.view(-1, 2).unbind(1) for sum_B in sums_B)
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta)


def against_group(logprobs: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Returns each row's loss against the mean of its group, for groups of any size."""
    sums_B = sequence_logprobs(logprobs, mask, mode="mean")
    counts_G = torch.bincount(groups)
    means_G = torch.zeros_like(counts_G, dtype=sums_B.dtype).index_add(0, groups, sums_B) / counts_G
    return -logsigmoid(sums_B - means_G[groups])


def distillation(topk_logprobs: Tensor, teacher_logprobs: Tensor, hidden: Tensor) -> Tensor:
    """Returns the forward KL over the teacher's candidates, and a penalty on hidden states."""
    forward_kl = (teacher_logprobs.exp() * (teacher_logprobs - topk_logprobs)).sum(-1)
    return forward_kl + 0.01 * hidden.square().mean(-1)


TOKEN = Loss(weighted)
PAIR = Loss(dpo, {"beta": 0.5}, group="pair", group_size=2, aggregation="group_mean")
GROUP = Loss(against_group, group="third", group_size="third_size", aggregation="row_mean")
DISTILLATION = Loss(distillation, columns={"topk_ids": "teacher_ids"}, aggregation="seq_mean_token_mean")


def configured(loss: dict[str, float | str]) -> Loss:
    """Returns the loss that the settings of a policy select."""
    settings = {"model": {"path": "model"}, "optimizer": {"lr": 1e-3}, "loss": loss}
    return preference_loss(PreferenceActorConfig.model_validate(settings))


STEPS: dict[str, list[tuple[Loss, int, float]]] = {
    "token": [(TOKEN, 12, 1.0)],
    "pair": [(PAIR, 12, 1.0)],
    "group": [(GROUP, 12, 1.0)],
    "distillation": [(DISTILLATION, 12, 1.0)],
    "token and ptx": [(TOKEN, 12, 0.3), (PTX, 3, 2.5)],
    "configured dpo": [(configured({"kind": "dpo", "beta": 0.5, "label_smoothing": 0.1}), 12, 1.0)],
    "configured cpo": [(configured({"kind": "cpo", "beta": 0.5}), 12, 1.0)],
    "configured kto": [(configured({"kind": "kto", "beta": 0.5, "undesirable_weight": 1.5}), 12, 1.0)],
    "pair and token": [(PAIR, 12, 0.5), (TOKEN, 5, 1.5)],
}
"""Losses of each optimizer step, as (loss, number of rows of its batch, weight)."""


@dataclass(frozen=True)
class Case:
    """A parallelism over a number of ranks."""

    ranks: int
    settings: dict
    tp: int = 1
    sp: int = 1
    dtype: torch.dtype = torch.float64
    slow: bool = True


CASES = {
    "ddp on 2": Case(2, {"strategy": "ddp"}, slow=False),
    "ddp on 4, padded": Case(4, {"strategy": "ddp", "packing": "never"}),
    "fsdp on 2, padded": Case(2, {"strategy": "fsdp", "packing": "never"}),
    "fsdp on 4": Case(4, {"strategy": "fsdp"}, slow=False),
    "fsdp on 4, checkpointed": Case(4, {"strategy": "fsdp", "gradient_checkpointing": True}),
    "ddp on 4, float32": Case(4, {"strategy": "ddp"}, dtype=torch.float32),
    "fsdp on 2, float32": Case(2, {"strategy": "fsdp"}, dtype=torch.float32),
    "sp on 2": Case(2, {"strategy": "ddp"}, sp=2),
    "tp x fsdp on 2 x 2": Case(4, {"strategy": "fsdp"}, tp=2),
    "tp on 2, norms split": Case(2, {"strategy": "fsdp", "sequence_parallel_norms": True}, tp=2),
}


def gradients(
    step: str,
    settings: dict,
    dtype: torch.dtype,
    group: distributed.ProcessGroup | None = None,
    tp: int = 1,
    sp: int = 1,
) -> dict[str, Tensor]:
    """Returns the full gradient of a step, whose rows are split over the data-parallel ranks of `group`."""
    model = qwen2(initializer_range=0.1)
    model = PolicyModel(to_float64(model) if dtype == torch.float64 else model)
    mesh = SINGLE_PROCESS if group is None else rank_mesh(group, device="cpu", tp=tp, sp=sp)
    engine = FsdpEngine(
        model, policy_outputs, OptimizerConfig(lr=1e-3), EngineConfig.model_validate(settings), mesh=mesh
    )
    num_parts = 1 if group is None else group.size() // (tp * sp)
    part = 0 if group is None else group.rank() // (tp * sp)
    for i, (loss, num_rows, weight) in enumerate(STEPS[step]):
        batch = to_dtype(rows(num_rows, seed=i), dtype)
        splits = split_evenly(num_rows, num_parts)
        if loss.group is not None:
            splits = split_groups(batch["rows", loss.group].numpy(), num_parts)
        split = splits[part]
        index = torch.arange(*split) if isinstance(split, tuple) else torch.from_numpy(split)
        own = take_rows(batch, index)
        columns = {name: column.dtype for name, column in own["tokens"].items()}
        bound = BoundLoss.of(loss, columns, Actor.COMPUTED, TEMPERATURE)
        engine.forward_backward(own, bound, bound.outputs, groups=loss.row_groups, weight=weight)
    engine._gradients.sum()
    return {name: to_full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def to_dtype(batch: TensorDict, dtype: torch.dtype) -> TensorDict:
    tokens = {n: c.to(dtype) if c.dtype.is_floating_point else c for n, c in batch["tokens"].items()}
    columns = {n: c.to(dtype) if c.dtype.is_floating_point else c for n, c in batch["rows"].items() if n != "length"}
    return make_tensordict(columns, tokens, lengths(batch))


def main(rank: int, folder: Path, names: Collection[str]) -> None:
    """Writes the gradients of the named cases, by (case, step)."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    process_groups = {size: distributed.new_group(list(range(size))) for size in (4, 2)}
    results = {}
    for name, case in CASES.items():
        if name in names and rank < case.ranks:
            group = process_groups[case.ranks]
            assert isinstance(group, distributed.ProcessGroup)
            settings = {"max_tokens_per_microbatch": 24} | case.settings
            for step in STEPS:
                results[name, step] = gradients(step, settings, case.dtype, group, case.tp, case.sp)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()
