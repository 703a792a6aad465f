"""Compares a policy, the student, with a frozen teacher: the teacher's values for a loss, and their agreement."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from flowrl.algorithms.registry import distillation_losses
from flowrl.config import DistillationLossConfig, EvaluationConfig
from flowrl.data.batch.batch import Batch
from flowrl.run.evaluation import Evaluation, collect_scores, evaluate_sets, generate_responses, measure_scores
from flowrl.workers.losses.loss import Loss

if TYPE_CHECKING:
    from flowrl.schedules.rewards import Scoring
    from flowrl.workers.groups import ActorGroup, ReferenceGroup, RolloutGroup


def teacher_columns(batch: Batch, teacher: "ReferenceGroup", loss: DistillationLossConfig) -> Batch:
    """Returns the batch with those values of the teacher that the loss reads. Does not block.

    Adds `teacher_logprobs`, the log-probabilities of the tokens, or `topk_ids` and `teacher_topk_logprobs`, the
    teacher's most likely tokens and their log-probabilities.
    """
    inputs = distillation_losses.inputs(distillation_losses.load(loss.kind))
    if "teacher_logprobs" in inputs:
        batch["teacher_logprobs"] = teacher.logprobs(batch)
    if "teacher_topk_logprobs" in inputs:
        candidates = teacher.topk(batch, k=loss.num_candidates)
        batch = batch.union(candidates.rename({"topk_logprobs": "teacher_topk_logprobs"}))
    return batch


def evaluate_agreement(
    actor: "ActorGroup",
    teacher: "ReferenceGroup",
    rollout: "RolloutGroup",
    reward: "Scoring | None",
    prompts: Batch | Mapping[str, Batch],
    config: EvaluationConfig | Mapping[str, EvaluationConfig],
) -> Evaluation:
    """Measures the student's responses to held-out prompts: agreement with the teacher, and scores. Blocks.

    Args:
        actor: the student.
        teacher: the teacher.
        rollout: generates with the newest weights that were sent.
        reward: scores the responses with the reward for evaluations. None: they have no scores.
        prompts: prompts with the columns of `PromptStream`, or several named sets of prompts.
        config: number of samples, and temperature. A mapping has those of each set (`config.evaluation_by_set`).

    Returns: `agreement`, the fraction of response tokens at which the most likely token of student and teacher is the
        same, and `evaluation/response_length`. With a reward also `accuracy` and the other metrics of the scores
        (`flowrl.run.evaluation.evaluate`). For named sets, the names end with `/NAME`.
    """

    def generate(rows: Batch, own: EvaluationConfig) -> Batch:
        batch = generate_responses(rollout, rows, own)
        return batch if reward is None else batch.union(reward.score(batch, evaluation=True))

    def measure(_: str, batch: Batch, own: EvaluationConfig) -> dict[str, float]:
        top_ids = teacher.topk.submit(batch, k=1).select("topk_ids").rename({"topk_ids": "teacher_top_ids"})
        measured = actor.measure.submit(batch.union(top_ids), AGREEMENT).get()
        agreement = next(metric.result() for name, metric in measured.items() if name.endswith("/agreement"))
        scores = {} if reward is None else measure_scores(collect_scores(batch, own, reward.limits), own)
        return {"agreement": agreement, **scores}

    return evaluate_sets(prompts, config, generate, measure)


def _compare_top_tokens(topk_ids: Tensor, teacher_top_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the fraction of different tokens as the loss, each `[B, L]`. The inputs are `[B, L, 1]`."""
    agrees_BL = (topk_ids == teacher_top_ids)[..., 0].float()
    return 1 - agrees_BL, {"agreement": agrees_BL}


AGREEMENT = Loss(_compare_top_tokens, topk=1, name="agreement")
"""Comparison of the student's most likely token with the column `teacher_top_ids`."""
