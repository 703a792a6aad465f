"""Best of N: the highest-scoring responses to each prompt, and the KL of this selection to the sampling policy.

Shape suffixes: B rows, R selected rows.
"""

import math

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_index


@torch.no_grad()
def best_of_n(scores: Tensor, groups: Tensor, *, keep: int = 1, min_score: float | None = None) -> Tensor:
    """Returns the rows with the `keep` highest scores of each group. Of equal scores, the earlier rows are selected.

    Args:
        scores: [B].
        groups: integer [B], group ids. Groups may be interleaved and differ in size.
        keep: number of rows per group, at least 1. A group with fewer rows is selected completely.
        min_score: rows with a lower score are not selected, so that a group may have fewer rows, or none. None selects
            any score.
    Returns: int64 [R], row indices in ascending order.
    Raises: ValueError for mismatched shapes, group ids that are not integers, NaN scores, or `keep` below 1.

    Stiennon et al. 2020, https://arxiv.org/abs/2009.01325; as data for fine-tuning: Touvron et al. 2023 (Llama 2),
    https://arxiv.org/abs/2307.09288, section 3.2.3. Deviations: `keep` and `min_score`.
    """
    group_of_B = group_index(groups)
    if scores.shape != groups.shape:
        raise ValueError(f"scores has shape {list(scores.shape)}, but must have one per group id, {list(groups.shape)}")
    if keep < 1:
        raise ValueError(f"keep is {keep}, but must be at least 1")
    if bool(scores.isnan().any()):
        raise ValueError("scores has NaN, which cannot be compared: replace it before the selection")
    order_B = scores.argsort(descending=True, stable=True)
    order_B = order_B[group_of_B[order_B].argsort(stable=True)]  # adjacent groups, best rows first
    sizes_G = group_of_B.bincount()
    starts_G = sizes_G.cumsum(0) - sizes_G
    rank_B = torch.arange(len(order_B), device=scores.device) - starts_G[group_of_B[order_B]]
    best_R = order_B[rank_B < keep]
    if min_score is not None:
        best_R = best_R[scores[best_R] >= min_score]
    return best_R.sort().values


def best_of_n_kl_bound(num_samples: int) -> float:
    """Returns log N - (N - 1) / N, an upper bound of the KL from the best of N samples to one sample, in nats.

    The KL approaches the bound if no two responses have the same score and each response is unlikely.

    Args:
        num_samples: N, at least 1.
    Raises: ValueError if N is below 1.

    Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3; as a bound: Beirami et al. 2024,
    https://arxiv.org/abs/2401.01879.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}, but must be at least 1")
    return math.log(num_samples) - (num_samples - 1) / num_samples
