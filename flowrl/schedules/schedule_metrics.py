"""What a schedule does to a run: how stale its samples are, who waits, and where its groups of samples are."""

from collections import defaultdict, deque
from collections.abc import Iterable

import torch
from tensordict import TensorDict

from flowrl.controller.dispatch import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.events import CallEvent
from flowrl.data.metric import Max, Mean, Metric
from flowrl.report.trace import rank_fractions
from flowrl.schedules.rules import Counts


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


def group_metrics(counts: Counts, before: Counts | None = None) -> dict[str, float]:
    """Where the groups are when a step has taken its own, and what was admitted, trained and dropped since the step
    `before`; None is since the beginning."""
    dropped = {name: count - (before.dropped.get(name, 0) if before else 0) for name, count in counts.dropped.items()}
    found = {
        "buffer_depth": counts.complete,
        "running_groups": counts.running,
        "waiting_groups": counts.waiting,
        "admitted_groups": counts.admitted - (before.admitted if before else 0),
        "trained_groups": counts.trained - (before.trained if before else 0),
        "dropped_groups": sum(dropped.values()),
    }
    found |= {f"dropped_{reason}": count for reason, count in dropped.items()}
    return {name: float(count) for name, count in found.items()}


WEIGHT_CALLS = frozenset({"load_weights", "load_sent", "load_shared", "set_version"})
"""Methods by which a rollout comes to other weights."""


def waited_for_weights(events: Iterable[CallEvent], role: str, start_ns: int, end_ns: int) -> float:
    """Seconds of [start_ns, end_ns] in which a rank of a role had done all that it was asked for, until weights came to
    it; mean over the ranks that were called.

    Args:
        events: calls of any roles, with those before the window that are the last of their ranks.
    """
    ranks: defaultdict[int, list[CallEvent]] = defaultdict(list)
    for event in events:
        if event.role == role:
            ranks[event.rank].append(event)
    waited_ns = 0
    for found in ranks.values():
        found.sort(key=lambda event: event.started_ns)
        free_ns = start_ns
        for event in found:
            if event.method in WEIGHT_CALLS:
                waited_ns += max(0, min(event.started_ns, end_ns) - max(free_ns, start_ns))
            free_ns = max(free_ns, event.ended_ns)
    return waited_ns / 1e9 / max(1, len(ranks))


class Level:
    """A number over time, as it was set."""

    def __init__(self) -> None:
        self._since: deque[tuple[int, float]] = deque()

    def set(self, now_ns: int, value: float) -> None:
        """From now on it is this. It is 0 before it is set."""
        if not self._since or self._since[-1][1] != value:
            self._since.append((now_ns, value))

    def integral_s(self, start_ns: int, end_ns: int) -> float:
        """The number times the seconds of [start_ns, end_ns] that it stood so; forgets what was before."""
        while len(self._since) > 1 and self._since[1][0] <= start_ns:
            self._since.popleft()
        changes = [at for at, _ in self._since]
        parts = zip(self._since, [*changes[1:], end_ns], strict=False)
        return sum(value * max(0, min(to, end_ns) - max(at, start_ns)) for (at, value), to in parts) / 1e9


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
