"""Selects the best responses to each prompt of a batch."""

from tensordict import TensorDict

from flowrl.algorithms import best_of_n, best_of_n_kl_bound
from flowrl.data.batch.batch import Batch
from flowrl.data.metric import Logged, Mean, Metric
from flowrl.rewards.row_scorer import FAILED


def select_best(batch: Batch, *, keep: int = 1, min_score: float | None = None) -> tuple[Batch, tuple[Logged, ...]]:
    """Returns the rows with the `keep` highest scores of each prompt, and metrics for `run.log`.

    Waits for the scores. Of equal scores, the samples with the lower indices are selected. A response whose reward
    failed is never selected.

    Args:
        batch: rows with the columns `scores` and `group`, and possibly `reward_failed`.
        keep: number of responses per prompt.
        min_score: responses with a lower score are not selected. None selects any score.
    Returns: the selected rows, in their order, possibly none. The metrics are `reward_selected`, their mean score,
        `selected_fraction`, their share of the batch, and, for the best response of each prompt, `kl_bound`.
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
