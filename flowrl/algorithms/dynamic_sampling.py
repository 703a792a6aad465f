"""Dynamic sampling (DAPO): keeps groups whose scores differ, and draws batches until enough such groups exist.

Shape suffix: B is the number of rows.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms.advantages.group_estimators import group_extremes, group_index

T = TypeVar("T")
"""Type of a batch. This module does not access its contents."""


@torch.no_grad()
def informative_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Returns a mask bool [B] of the rows in groups whose scores are not all equal. Other groups have zero advantages.

    Args:
        scores: [B].
        groups: integer [B], group ids. Groups may be interleaved and differ in size.
    Returns: bool [B]. It is False for groups of one row and groups with a NaN.
    Raises: ValueError for mismatched shapes, or group ids that are not integers.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. (11): 0 < number of correct responses < group size.
    Deviation: scores may be any numbers, and at least two scores of a group must differ.
    """
    group_of_B = group_index(groups)
    if scores.shape != groups.shape:
        raise ValueError(f"scores has shape {list(scores.shape)}, but must have one per group id, {list(groups.shape)}")
    low_B, high_B = group_extremes(scores, group_of_B)
    return high_B > low_B


@dataclass(frozen=True)
class FullBatch(Generic[T]):
    """A batch with the required number of groups, given as rows of one or more source batches.

    `parts` contains pairs of a source batch and int64 row indices. Concatenate them in this order, for instance
    `Batch.concat([batch.rows(rows.numpy()) for batch, rows in full.parts])`.
    """

    parts: tuple[tuple[T, Tensor], ...]
    groups: Tensor
    """int64 [B], new group ids starting at 0. New ids are required because ids of different source batches may
    collide.
    """
    num_rounds: int
    """Number of source batches drawn. It is 0 if groups left over from the previous batch sufficed."""
    num_drawn: int
    """Number of groups in the drawn batches."""
    num_informative: int
    """Number of informative groups in the drawn batches."""


def full_batches(
    source: Iterable[tuple[T, Tensor, Tensor]], *, num_groups: int, max_rounds: int
) -> Iterator[FullBatch[T]]:
    """Yields batches of exactly `num_groups` informative groups, drawing scored batches from the source as needed.

    The iterator draws from the source only while a batch is incomplete. Groups are not split. Surplus groups are the
    first groups of the next batch. Their responses are then at least one weight version old.

    Args:
        source: yields (batch, scores [B], groups [B]). Group ids are unique only within a batch.
        num_groups: > 0, number of groups per batch.
        max_rounds: > 0, maximum number of source batches per yielded batch.
    Returns: an iterator, which ends when the source ends. An incomplete last batch is dropped.
    Raises: ValueError if num_groups or max_rounds is not positive. The iterator raises ValueError if a batch is
        incomplete after max_rounds.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2. Deviation: the published code drops surplus
    groups.
    """
    for name, value in (("num_groups", num_groups), ("max_rounds", max_rounds)):
        if value <= 0:
            raise ValueError(f"{name} is {value}, but must be above 0")
    return _fill(source, num_groups, max_rounds)


def _fill(source: Iterable[tuple[T, Tensor, Tensor]], num_groups: int, max_rounds: int) -> Iterator[FullBatch[T]]:
    surplus: deque[tuple[T, Tensor]] = deque()
    num_rounds = num_drawn = num_informative = 0
    for batch, scores, groups in source:
        informative = _informative_rows(scores, groups)
        surplus.extend((batch, rows) for rows in informative)
        num_rounds += 1
        num_drawn += len(torch.unique(groups))
        num_informative += len(informative)
        while len(surplus) >= num_groups:
            selected = [surplus.popleft() for _ in range(num_groups)]
            yield _join(selected, num_rounds, num_drawn, num_informative)
            num_rounds = num_drawn = num_informative = 0
        if num_rounds == max_rounds:
            raise ValueError(
                f"after max_rounds = {max_rounds} rounds only {len(surplus)} of the {num_groups} groups of a batch "
                f"have scores that differ ({num_informative} of {num_drawn} groups in these rounds): use prompts of "
                "medium difficulty, more samples per prompt, fewer groups, or a larger max_rounds"
            )


def _informative_rows(scores: Tensor, groups: Tensor) -> list[Tensor]:
    """Returns the row indices of each informative group, ordered by the first row of the groups."""
    rows = informative_groups(scores, groups).nonzero()[:, 0].cpu()
    group_of = group_index(groups.cpu()[rows])
    counts = torch.bincount(group_of)
    rows_of_groups = rows[group_of.argsort(stable=True)].split(counts.tolist())
    return sorted(rows_of_groups, key=lambda group_rows: int(group_rows[0]))


def _join(selected: list[tuple[T, Tensor]], num_rounds: int, num_drawn: int, num_informative: int) -> FullBatch[T]:
    """Joins groups into a batch. Consecutive groups of the same source batch become one part."""
    parts: list[tuple[T, list[Tensor]]] = []
    for batch, rows in selected:
        if not parts or parts[-1][0] is not batch:
            parts.append((batch, []))
        parts[-1][1].append(rows)
    sizes = torch.tensor([len(rows) for _, rows in selected])
    return FullBatch(
        parts=tuple((batch, torch.cat(rows)) for batch, rows in parts),
        groups=torch.arange(len(selected)).repeat_interleave(sizes),
        num_rounds=num_rounds,
        num_drawn=num_drawn,
        num_informative=num_informative,
    )
