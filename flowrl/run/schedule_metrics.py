"""What a schedule does to a run: how stale its samples are, who waits, and where its groups of samples are."""

from collections.abc import Iterable, Mapping

import torch
from tensordict import TensorDict

from flowrl.controller.future import Future
from flowrl.data.batch import Batch
from flowrl.data.block import LocalRef
from flowrl.data.events import CallEvent
from flowrl.data.metric import Max, Mean, Metric
from flowrl.data.table import lengths
from flowrl.run.schedule import Counts
from flowrl.run.trace import rank_fractions


def staleness(batch: Batch, version: int, bound: int) -> Future | LocalRef:
    """Metrics of how old a batch is for a trainer whose weights have this version. Does not wait.

    A row is as old as its oldest token: the staleness of tokens that the weights of version w sampled is `version - w`.
    `staleness` is the mean over rows, `staleness_max` the largest, `staleness_<k>` the fraction of rows of each
    staleness from 0 to `bound`.
    """
    return batch.reduce(measured_staleness, ["weight_version", "response_mask"], version=version, bound=bound)


def measured_staleness(table: TensorDict, version: int, bound: int) -> dict[str, Metric]:
    """`staleness`, beside the data."""
    lengths_B, mask_T = lengths(table), table["tokens", "response_mask"]
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)[mask_T]
    age_T = version - table["tokens", "weight_version"][mask_T].to(torch.int64)
    age_B = torch.full((len(lengths_B),), -1, dtype=torch.int64).scatter_reduce_(0, row_T, age_T, "amax")
    age_B = age_B[age_B >= 0]  # a row without a response has no age
    rows = len(age_B)
    found: dict[str, Metric] = {"staleness": Mean(float(age_B.sum()), rows)}
    if rows:
        found["staleness_max"] = Max(float(age_B.max()))
    for age in range(bound + 1):
        found[f"staleness_{age}"] = Mean(float((age_B == age).sum()), rows)
    return found


def group_metrics(counts: Counts, dropped: Mapping[str, int]) -> dict[str, float]:
    """Where the groups are when a step has taken its own, and those that were dropped since the step before."""
    found = {
        "buffer_depth": float(counts.complete),
        "running_groups": float(counts.running),
        "waiting_groups": float(counts.waiting),
        "dropped_groups": float(sum(dropped.values())),
    }
    return found | {f"dropped_{reason}": float(count) for reason, count in dropped.items()}


class Idleness:
    """Which part of a step each role did nothing in."""

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}

    def of(self, events: Iterable[CallEvent], roles: Iterable[str], start_ns: int, end_ns: int) -> dict[str, float]:
        """`idle_<role>` of the roles that were ever called: the mean over ranks of the share of [start_ns, end_ns] in
        which the rank was in no method of the role."""
        if end_ns <= start_ns:
            return {}
        busy = rank_fractions(events, start_ns, end_ns)
        for role, fractions in busy.items():
            self._ranks[role] = max(self._ranks.get(role, 0), len(fractions))
        known = [role for role in roles if role in self._ranks]
        return {f"idle_{role}": 1 - sum(busy.get(role, ())) / self._ranks[role] for role in known}
