"""Training with losses of a recipe through worker groups, inline and on Ray."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import Batch, Cluster, ContractError, Placement, WorkerGroup
from flowrl.algorithms import kto_loss, ptx_weights, sequence_logprobs
from flowrl.config import ActorConfig, CriticConfig, ModelConfig, OptimizerConfig, ReferenceConfig
from flowrl.controller.dispatch import split_batch
from flowrl.controller.errors import WorkerUserError
from flowrl.controller.worker import get_contract
from flowrl.data.metric import Metric
from flowrl.engines.models.loading import load_policy
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.model_flops import model_flops
from flowrl.workers import PTX, Actor, Critic, Loss, Reference, RewardModel
from tests.engines.closeness import FLOAT32_RTOL, assert_norm_close
from tests.engines.combined_losses import PAIR, distillation
from tests.errors import rejects

ROOT = Path(__file__).parents[2]
IDS, LENGTHS = [2, 3, 12, 4, 14, 5, 6, 1, 7, 8, 12, 3, 2, 3, 9, 1, 5, 12, 3], [8, 4, 4, 3]
MASK = [False] * 5 + [True] * 3 + [False] * 2 + [True] * 2 + [False] + [True] * 3 + [False] + [True] * 2
OPTIMIZER = OptimizerConfig(lr=0.01)


class RecordedEngine(FsdpEngine):
    """Records which losses are the last of their optimizer steps."""

    are_last: ClassVar[list[bool]] = []

    def forward_backward(self, *arguments: Any, is_last: bool = False, **settings: Any) -> dict[str, Metric]:
        self.are_last.append(is_last)
        return super().forward_backward(*arguments, is_last=is_last, **settings)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    placement = Placement(pools={"main": [1]}, roles=dict.fromkeys(("actor", "critic", "reference"), "main"))
    with Cluster(placement, backend="inline", num_threads=1) as started:
        yield started


def rows(**columns: Any) -> Batch:
    tokens = {"input_ids": IDS, "response_mask": MASK, "old_logprobs": torch.full((19,), -2.0)}
    tokens |= {"advantages": torch.linspace(-1, 1, 19), "ref_logprobs": torch.full((19,), -2.5)}
    return Batch.from_columns(rows={"pair": [0, 1, 0, 1]} | columns, tokens=tokens, lengths=LENGTHS)


def actor_of(cluster: Cluster, model: ModelConfig, **settings: Any) -> WorkerGroup:
    config = ActorConfig.model_validate({"model": model, "optimizer": OPTIMIZER} | settings)
    return cluster.group("actor", Actor, config)


def logprobs_of(actor: WorkerGroup) -> Tensor:
    return actor.logprobs(rows()).get("logprobs")


def test_the_loss_of_an_update_is_the_last_of_its_step(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model, engine={"kind": "tests.workers.test_trained_worker:RecordedEngine"})
    for method in (actor.forward_backward, actor.update, actor.forward_backward):
        method(rows()).get()
    actor.optim_step().get()
    assert RecordedEngine.are_last == [False, True, False]


def preferred(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs * advantages


def test_an_update_is_forward_backward_and_optim_step(model: ModelConfig):
    results = []
    for is_split in (False, True):
        placement = Placement(pools={"main": [1]}, roles={"actor": "main"})
        with Cluster(placement, backend="inline", num_threads=1) as cluster:
            actor = actor_of(cluster, model, kl_loss_coef=0.1)
            if is_split:
                metrics = actor.forward_backward(rows()).get() | actor.optim_step().get()
            else:
                metrics = actor.update(rows()).get()
            results.append((metrics, logprobs_of(actor)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert {"actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr"} <= results[0][0].keys()


def test_a_policy_loss_and_ptx_are_one_step_with_their_own_metrics(cluster: Cluster, model: ModelConfig):
    actor, text = actor_of(cluster, model), rows().rows([1]).select("input_ids", "response_mask")
    policy_weight, ptx_weight = ptx_weights(coef=0.25, form="mix")
    cross_entropy = -logprobs_of(actor)[8:12][torch.tensor(MASK[8:12])].mean().item()
    metrics = actor.forward_backward(rows(), weight=policy_weight).get()
    metrics |= actor.forward_backward(text, PTX, ptx_weight).get()
    metrics |= actor.optim_step().get()
    assert metrics["actor/ptx/loss"].result() == pytest.approx(cross_entropy, rel=FLOAT32_RTOL)
    assert {"actor/loss", "actor/ratio", "actor/grad_norm", "actor/skipped_update"} <= metrics.keys()


def test_a_function_is_a_loss(cluster: Cluster, model: ModelConfig):
    actor = actor_of(cluster, model)
    before = logprobs_of(actor)
    metrics = actor.update(rows(), preferred).get()
    mask = torch.tensor(MASK)
    expected = -(before * torch.linspace(-1, 1, 19))[mask].mean().item()
    assert metrics["actor/loss"].result() == pytest.approx(expected, rel=FLOAT32_RTOL, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_that_is_not_bool_is_rejected_by_name(cluster: Cluster, model: ModelConfig, dtype: torch.dtype):
    batch = Batch.from_columns(
        tokens={"input_ids": IDS, "response_mask": torch.tensor(MASK).to(dtype)}, lengths=LENGTHS
    )
    with rejects("response_mask", f"{dtype}", "bool", error=WorkerUserError):
        actor_of(cluster, model).forward_backward(batch, PTX).get()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"loss": Loss(preferred, columns={"advantages": "gains"})}, ("gains", "advantages", "input_ids", "logprobs")),
        ({"loss": Loss(preferred, mask="kept")}, ("kept", "response_mask")),
        ({"loss": replace(PAIR, group="couple")}, ("couple", "pair")),
        ({"loss": 3}, ("int", "function")),
        ({"weight": float("inf")}, ("weight", "inf")),
    ],
)
def test_a_wrong_loss_is_rejected_before_a_call_is_sent(
    cluster: Cluster, model: ModelConfig, arguments: dict[str, Any], facts: tuple[str, ...]
):
    actor = actor_of(cluster, model)
    logprobs_of(actor)
    first = cluster.calls.next_call_id()
    with rejects("actor.forward_backward", *facts, error=ContractError):
        actor.forward_backward(rows(), **arguments)
    assert cluster.calls.next_call_id() == first + 1, "no call was sent"
    actor.update(rows()).get()


def test_a_step_without_forward_backward_is_an_error(cluster: Cluster, model: ModelConfig):
    with rejects("optim_step", "forward_backward", error=WorkerUserError):
        actor_of(cluster, model).optim_step().get()


def test_a_checkpoint_between_the_halves_is_refused(cluster: Cluster, model: ModelConfig, tmp_path: Path):
    actor = actor_of(cluster, model)
    actor.forward_backward(rows()).get()
    with rejects("forward_backward", "optim_step", error=WorkerUserError):
        actor.save_checkpoint(tmp_path).get()


def test_pairs_raise_the_margin_and_split_pairs_are_rejected(cluster: Cluster, model: ModelConfig):
    actor = actor_of(cluster, model)
    reports = [
        actor.update(minibatch, PAIR).get()
        for minibatch in rows().minibatches(2, epochs=6, groups="pair")
        if sorted(minibatch.get("pair").tolist()) in ([0, 0], [1, 1])
    ]
    assert len(reports) == 12
    assert reports[-1]["actor/margin"].result() > reports[0]["actor/margin"].result()
    with rejects("pair", "2", error=WorkerUserError):
        actor.update(rows().rows([0, 1, 2]), PAIR).get()


def test_rows_with_labels_train_with_kto(cluster: Cluster, model: ModelConfig):
    def kto(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, label: Tensor, kl: Tensor):
        sums, ref_sums = (sequence_logprobs(values, mask, mode="sum") for values in (logprobs, ref_logprobs))
        return kto_loss(sums, ref_sums, label, reference_kl=kl[0], beta=0.1)

    actor, batch = actor_of(cluster, model), rows(label=[True, False, True, False], kl=[0.5] * 4)
    loss = Loss(kto, aggregation="row_mean")
    values = [actor.update(batch, loss).get()["actor/loss"].result() for _ in range(4)]
    assert values[-1] < values[0]


def test_a_critic_trains_with_a_loss_of_its_values(cluster: Cluster, model: ModelConfig):
    def squared(values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns).square()

    critic = cluster.group("critic", Critic, CriticConfig(model=model, optimizer=OPTIMIZER))
    batch = Batch.from_columns(
        tokens={"input_ids": IDS, "response_mask": MASK, "returns": torch.ones(19)}, lengths=LENGTHS
    )
    losses = [critic.update(batch, squared).get()["critic/loss"].result() for _ in range(10)]
    assert losses[0] == pytest.approx(1.0) and losses[-1] < 0.5


def test_a_teachers_candidates_are_its_most_likely_tokens(cluster: Cluster, model: ModelConfig):
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model, temperature=0.5))
    candidates = reference.topk(rows(), k=4)
    ids, logprobs = candidates.get("topk_ids"), candidates.get("topk_logprobs")
    own = reference.logprobs(rows()).get("logprobs")
    mask = torch.tensor(MASK)
    assert ids.shape == logprobs.shape == (19, 4) and not logprobs[~mask].any()
    assert (logprobs.diff(dim=-1) <= 0).all() and (logprobs[mask].exp().sum(-1) <= 1 + 1e-6).all()
    is_own = ids == torch.tensor(IDS)[:, None]
    assert is_own[mask].any()
    assert_norm_close(logprobs[is_own & mask[:, None]], own[is_own.any(-1) & mask])
    assert reference.topk(rows().rows([]), k=4).get("topk_ids").shape == (0, 4)
    with rejects("16", "15", error=WorkerUserError):
        reference.topk(rows(), k=16).get("topk_ids")


def test_a_student_learns_the_distribution_of_its_teacher(cluster: Cluster, model: ModelConfig):
    actor = actor_of(cluster, model)
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model, temperature=0.3))
    batch = rows().union(reference.topk(rows(), k=8).rename({"topk_logprobs": "teacher_logprobs"}))
    loss = Loss(distillation)
    losses = [actor.update(batch, loss).get()["actor/loss"].result() for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_own_candidates_of_the_model_have_its_log_probabilities(cluster: Cluster, model: ModelConfig):
    def check(topk_ids: Tensor, topk_logprobs: Tensor, input_ids: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
        is_own = (topk_ids == input_ids[..., None]) & mask[..., None]
        assert is_own.any() and torch.equal(topk_logprobs[is_own], logprobs[is_own.any(-1)])
        return -topk_logprobs[..., 0]

    metrics = actor_of(cluster, model).update(rows(), Loss(check, topk=12)).get()
    assert metrics["actor/loss"].result() > 0


PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import Tensor
from flowrl import Batch, Cluster, Placement
from flowrl.config import ActorConfig, EngineConfig, ModelConfig, OptimizerConfig
from flowrl.workers import Actor, Loss
from tests.workers.test_trained_worker import rows

def margin(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    sums = (logprobs - ref_logprobs).masked_fill(~mask, 0).sum(-1).view(-1, 2)
    return torch.nn.functional.softplus(sums[:, 1] - sums[:, 0])

if __name__ == "__main__":
    backend, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    placement = Placement(device="cpu", pools={"main": [ranks]}, roles={"actor": "main"})
    with Cluster(placement, backend=backend, num_threads=1) as cluster:
        config = ActorConfig(model=ModelConfig(path=folder, dtype="float64"), optimizer=OptimizerConfig(lr=0.01))
        actor = cluster.group("actor", Actor, config)
        for _ in range(2):
            actor.forward_backward(rows(), Loss(margin, aggregation="group_mean", group="pair", group_size=2))
            actor.forward_backward(rows(), lambda logprobs: -logprobs, weight=0.1)
            metrics = actor.optim_step().get()
        print(metrics["actor/grad_norm"].result())
"""


@pytest.mark.slow
def test_functions_of_a_program_reach_the_ranks_of_ray(model: ModelConfig, tmp_path: Path):
    """The rows of a pair are 0 and 2, or 1 and 3, so that an even split over two ranks would divide them."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    norms = []
    for backend, ranks in (("inline", "1"), ("ray", "2")):
        command = [sys.executable, str(tmp_path / "program.py"), backend, ranks, str(model.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        norms.append(float(done.stdout.split()[-1]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        *(Actor.logprobs, Actor.forward_backward, Actor.update, Critic.values, Critic.update),
        *(Reference.logprobs, Reference.topk, RewardModel.score),
    ],
)
def test_ranks_of_a_forward_pass_receive_as_many_tokens(method: Callable[..., object]) -> None:
    lengths = [90, 3, 80, 4, 2, 3, 70, 60, 5, 3]
    batch = Batch.from_columns(tokens={"input_ids": [1] * sum(lengths)}, lengths=lengths)
    contract = get_contract(method)
    assert contract is not None
    first, second = (batch.lengths()[np.asarray(rows)].sum() for rows in split_batch(batch, 2, contract))
    assert first + second == sum(lengths) and abs(first - second) <= 10
    assert split_batch(batch.with_sections(2), 2, contract) == [(0, 5), (5, 10)]


def test_calls_report_the_flops_of_their_passes_and_the_memory_of_the_device(
    cluster: Cluster, model: ModelConfig
) -> None:
    actor = actor_of(cluster, model)
    actor.logprobs(rows()).get("logprobs")
    actor.update(rows()).get()
    forward, training = (event.usage for event in list(cluster.calls.events)[-2:])
    flops = model_flops(load_policy(model))
    assert flops is not None
    for usage, is_training in ((forward, False), (training, True)):
        assert usage["tokens"] == 19
        assert usage["flops"] == flops.count(LENGTHS, sum(MASK), is_training=is_training)
        assert 0 < usage["allocated"] <= usage["reserved"] and usage["free"] > 0
    assert "memory_fraction" not in training and "peak_flops" not in training, "only GPUs have these figures"
