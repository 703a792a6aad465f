"""DPO on pairs of responses (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7)."""

from collections.abc import Iterable

from torch import Tensor

from flowrl import Batch
from flowrl.algorithms import dpo_loss, sequence_logprobs
from flowrl.config import ReferenceConfig, RunConfig, TrainedConfig
from flowrl.run.loop import Run, Summary
from flowrl.workers import Actor, Loss, Reference


class DPOConfig(RunConfig):
    actor: TrainedConfig
    reference: ReferenceConfig
    beta: float = 0.1


def dpo(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows of a pair are adjacent: first the chosen one, then the rejected one."""
    policy_B, reference_B = (sequence_logprobs(values, mask, mode="sum") for values in (logprobs, ref_logprobs))
    return dpo_loss(policy_B[::2], policy_B[1::2], reference_B[::2], reference_B[1::2], beta=beta)


def train(config: DPOConfig, pairs: Iterable[Batch]) -> Summary:
    loss = Loss(dpo, {"beta": config.beta}, aggregation="group_mean", group="pair", group_size=2)
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        reference = run.group("reference", Reference, config.reference)
        for batch in run.batches(pairs, policy=actor):
            batch["ref_logprobs"] = reference.logprobs(batch)
            run.log(actor.update(batch, loss))
        run.save_model(actor)
        return run.finish()
