"""Targets of training on a policy's own responses: the best of several responses, and the distributions of a teacher.

The teacher is a frozen model. The student is the policy, which is trained to match the teacher.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensordict import TensorDict
from torch import Tensor

from flowrl.algorithms import best_of_n, best_of_n_kl_bound
from flowrl.algorithms.registry import distillation_losses
from flowrl.config import DistillationLossConfig, EvaluationConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.metric import Logged, Mean, Metric
from flowrl.rewards.row_scorer import FAILED
from flowrl.run.evaluation import Evaluation, collect_scores, evaluate_sets, generate_responses, measure_scores
from flowrl.workers.losses.loss import Loss

if TYPE_CHECKING:
    from flowrl.schedules.rewards import Scoring
    from flowrl.workers.groups import ActorGroup, ReferenceGroup, RolloutGroup


def select_best(batch: Batch, *, keep: int = 1, min_score: float | None = None) -> tuple[Batch, tuple[Logged, ...]]:
    """Returns the rows with the `keep` highest scores of each prompt, and metrics for `run.log`.

    Waits for the scores. Among equal scores, the samples with the lower indices are selected. A response whose reward
    failed is never selected.

    Args:
        batch: rows with the columns `scores` and `group`, and possibly `reward_failed`.
        keep: number of responses per prompt.
        min_score: responses with a lower score are not selected. None selects any score.
    Returns: the selected rows in the order of the batch, possibly none. The metrics are `reward_selected` (mean score
        of the selected rows), `selected_fraction` (their share of the batch) and, only with `keep` 1 and without
        `min_score`, `kl_bound` (`best_of_n_kl_bound`, averaged over prompts).
    """
    candidates = batch.rows((~batch.get(FAILED)).nonzero().flatten().numpy()) if FAILED in batch else batch
    groups_B = candidates.get("group")
    best = candidates.rows(best_of_n(candidates.get("scores"), groups_B, keep=keep, min_score=min_score).numpy())
    metrics: dict[str, Metric] = {"selected_fraction": Mean(len(best), len(batch))}
    if keep == 1 and min_score is None:
        bounds = [best_of_n_kl_bound(size) for size in groups_B.unique(return_counts=True)[1].tolist()]
        metrics["kl_bound"] = Mean(sum(bounds), len(bounds))
    return best, (metrics, best.reduce(mean_score, ("scores",)))


def mean_score(table: TensorDict) -> dict[str, Metric]:
    """Returns the mean score of the selected rows. Runs on the task worker."""
    scores_B = table["rows", "scores"]
    return {"reward_selected": Mean(float(scores_B.sum()), len(scores_B))}


def teacher_columns(batch: Batch, teacher: "ReferenceGroup", loss: DistillationLossConfig) -> Batch:
    """Adds to a batch the teacher's values that the loss reads, and returns the batch. Does not block.

    The columns are `teacher_logprobs` (log-probabilities of the response tokens), or `topk_ids` and
    `teacher_topk_logprobs` (the teacher's most likely tokens and their log-probabilities).
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
        rollout: generates with the weights of the last weight sync.
        reward: scores the responses with the reward for evaluations. None: no scores.
        prompts: prompts with the columns of `PromptStream`, or several named sets of prompts.
        config: number of samples, and temperature. For named sets: name -> settings (`config.evaluation_by_set`).

    Returns: `agreement`, the fraction of response tokens at which student and teacher have the same most likely token,
        and `evaluation/response_length`. With a reward also `accuracy` and the other metrics of the scores
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
    """Returns the loss (0 where both tokens are equal, otherwise 1) and `agreement` (1 - loss), each [B, L]."""
    agrees_BL = (topk_ids == teacher_top_ids)[..., 0].float()
    return 1 - agrees_BL, {"agreement": agrees_BL}


AGREEMENT = Loss(_compare_top_tokens, topk=1, name="agreement")
"""Comparison of the student's most likely token with the column `teacher_top_ids`."""
