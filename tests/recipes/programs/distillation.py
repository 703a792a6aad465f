"""On-policy distillation (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649): the forward KL to a teacher, on its
most likely tokens, at responses of the student.
"""

from collections.abc import Iterable

from flowrl import Batch
from flowrl.algorithms import topk_forward_kl_loss
from flowrl.config import ReferenceConfig, RolloutConfig, RunConfig, TrainedConfig
from flowrl.run.loop import Run, Summary
from flowrl.workers import Actor, Loss, Reference, Rollout


class DistillationConfig(RunConfig):
    rollout: RolloutConfig
    actor: TrainedConfig
    teacher: ReferenceConfig
    top_k: int = 8


def train(config: DistillationConfig, prompts: Iterable[Batch]) -> Summary:
    with Run(config) as run:
        actor = run.group("actor", Actor, config.actor)
        teacher = run.group("teacher", Reference, config.teacher)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
        for batch in run.batches(prompts, policy=actor):
            batch = batch.union(rollout.generate(batch))
            known = teacher.topk(batch, k=config.top_k).rename({"topk_logprobs": "teacher_topk_logprobs"})
            run.log(actor.update(batch.union(known), Loss(topk_forward_kl_loss)))
            run.sync_weights(actor, rollout)
        run.save_model(actor)
        return run.finish()
