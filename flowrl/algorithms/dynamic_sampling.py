"""Dynamic sampling: only groups that say something, and asking for more until there are enough of them.

Shape suffixes: B rows.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_statistics import group_extremes, group_index

T = TypeVar("T")
"""A batch of any kind; it is handed through and never looked into."""


@torch.no_grad()
def informative_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """True at the rows of groups whose scores are not all equal: the others have no advantage in a group estimator.

    Arguments:
        scores: [B], one score per row.
        groups: integer [B], rows with equal ids form a group; neither contiguous nor of equal size.
    Returns: bool [B], the same for all rows of a group. A group of one is false, and so is one with a NaN.
    Raises: ValueError on scores that are not one per row, on ids that are not integers.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. (11): 0 < number of correct answers < group size.
    Deviation: any scores, of which at least two must differ.
    """
    group_of_B = group_index(groups)
    if scores.shape != groups.shape:
        raise ValueError(f"scores has shape {list(scores.shape)}, it must have one per group id, {list(groups.shape)}")
    low_B, high_B = group_extremes(scores, group_of_B)
    return high_B > low_B


@dataclass(frozen=True)
class FullBatch(Generic[T]):
    """Rows of one or several batches that make up a batch of the wanted number of groups.

    `parts` has batches, each with the rows to take from it, int64. Join them in this order, for instance
    `Batch.concat([batch.rows(rows.numpy()) for batch, rows in full.parts])`.
    """

    parts: tuple[tuple[T, Tensor], ...]
    groups: Tensor
    """int64 [B], new ids from 0 on for the rows of the parts in order: ids of different batches may be the same."""
    num_rounds: int
    """How many batches were asked for; 0 if what was left over before was enough."""
    num_asked: int
    """How many groups these batches had."""
    num_informative: int
    """How many of them were informative."""


def full_batches(
    source: Iterable[tuple[T, Tensor, Tensor]], *, num_groups: int, max_rounds: int
) -> Iterator[FullBatch[T]]:
    """Batches of exactly `num_groups` informative groups, from as many scored batches of the source as that takes.

    The source is asked only while a batch is not full. Groups stay whole. Those that are over are the first of the next
    batch, in the order in which they came; their responses are then one policy version old or more.

    Arguments:
        source: yields (batch, scores [B], groups [B]); the ids of a batch are its own.
        num_groups: > 0, the size of a batch.
        max_rounds: > 0, how often the source may be asked for one batch.
    Returns: an iterator. It ends when the source does, and what is then left over, less than a batch, is dropped.
    Raises: ValueError at once on a num_groups or max_rounds that is not above 0; and from the iterator, which is then
        at its end, if a batch is not full after max_rounds. The user mends that, with other data or settings: a recipe
        turns it into a `UserError`.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2. Deviation: groups that are over are kept; the
    published code drops them.
    """
    for name, value in (("num_groups", num_groups), ("max_rounds", max_rounds)):
        if value <= 0:
            raise ValueError(f"{name} is {value}, it must be above 0")
    return _fill(source, num_groups, max_rounds)


def _fill(source: Iterable[tuple[T, Tensor, Tensor]], num_groups: int, max_rounds: int) -> Iterator[FullBatch[T]]:
    waiting: deque[tuple[T, Tensor]] = deque()
    num_rounds = num_asked = num_informative = 0
    for batch, scores, groups in source:
        informative = _informative_rows(scores, groups)
        waiting.extend((batch, rows) for rows in informative)
        num_rounds += 1
        num_asked += len(torch.unique(groups))
        num_informative += len(informative)
        while len(waiting) >= num_groups:
            chosen = [waiting.popleft() for _ in range(num_groups)]
            yield _join(chosen, num_rounds, num_asked, num_informative)
            num_rounds = num_asked = num_informative = 0
        if num_rounds == max_rounds:
            raise ValueError(
                f"after max_rounds = {max_rounds} rounds only {len(waiting)} of the {num_groups} groups of a batch "
                f"have scores that differ ({num_informative} of {num_asked} groups in these rounds): take prompts that "
                "are neither too easy nor too hard, more samples per prompt, fewer groups, or more rounds"
            )


def _informative_rows(scores: Tensor, groups: Tensor) -> list[Tensor]:
    """For each informative group its rows, in order; groups in the order of their first row."""
    chosen = informative_groups(scores, groups).nonzero()[:, 0].cpu()
    group_of = group_index(groups.cpu()[chosen])
    counts = torch.bincount(group_of)
    rows_of_groups = chosen[group_of.argsort(stable=True)].split(counts.tolist())
    return sorted(rows_of_groups, key=lambda rows: int(rows[0]))


def _join(chosen: list[tuple[T, Tensor]], num_rounds: int, num_asked: int, num_informative: int) -> FullBatch[T]:
    """Groups that follow one another in the same batch become one part."""
    parts: list[tuple[T, list[Tensor]]] = []
    for batch, rows in chosen:
        if not parts or parts[-1][0] is not batch:
            parts.append((batch, []))
        parts[-1][1].append(rows)
    sizes = torch.tensor([len(rows) for _, rows in chosen])
    return FullBatch(
        parts=tuple((batch, torch.cat(rows)) for batch, rows in parts),
        groups=torch.arange(len(chosen)).repeat_interleave(sizes),
        num_rounds=num_rounds,
        num_asked=num_asked,
        num_informative=num_informative,
    )
