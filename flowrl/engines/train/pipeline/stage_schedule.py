"""The layers of each pipeline stage, and the order of its passes. Pure functions.

1F1B: a stage runs forward passes until the first gradient arrives, and then alternates backward and forward passes.
Stage s of p, counted from 0, therefore has at most p - s micro-batches between their forward and backward pass. With m
micro-batches and stages of equal cost, each stage is idle for (p - 1) / (m + p - 1) of the time. Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2.

torch's `PipelineStage` and `Schedule1F1B` are not used, because they have a fixed number of micro-batches of equal
shape. The micro-batches of flowrl differ in number and size between calls. `one_forward_one_backward` returns the order
of torch's schedule.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "glm", "glm4"})
"""Model families (`model_type`) that support pipeline parallelism. A family is added with a test
(tests/engines/models/test_families.py), because its modules do not show all of its computation outside the layers. For
example, Granite scales the embeddings, and the last norm of OLMo has no weight.
"""

MAX_UNFINISHED = 2
"""Largest number of unfinished sends of a stage per direction. Before a third send, a stage waits until the oldest has
been received. In 1F1B, the receiver needs that micro-batch before anything that this stage sends later, so the wait
causes no deadlock.
"""


class StageLayers(NamedTuple):
    """Indices of the decoder layers of a stage."""

    start: int
    end: int
    """Index after the last layer."""


def split_layers(costs: Sequence[int], num_stages: int, *, head: int = 0) -> list[StageLayers]:
    """Divides the layers of a model among stages so that the most expensive stage costs as little as possible.

    Stages have at least one layer. Among equal divisions, the first stages get the fewest layers: they have the most
    micro-batches in memory, and the first one also has the embeddings, which cost no matrix product.

    Args:
        costs: cost of each layer, such as its number of parameters.
        num_stages: number of stages, at most the number of layers.
        head: cost of the head, which the last stage has.
    """
    num_layers = len(costs)
    assert 1 <= num_stages <= num_layers, "each stage has a layer"
    # least[k][i]: the smallest possible cost of the most expensive of the last k stages, which have the layers from i.
    least: list[dict[int, int]] = [{}, {i: sum(costs[i:]) + head for i in range(num_layers)}]
    for k in range(2, num_stages + 1):
        ends = {i: range(i + 1, num_layers - k + 2) for i in range(num_layers - k + 1)}
        least.append({i: min(max(sum(costs[i:end]), least[k - 1][end]) for end in ends[i]) for i in ends})
    limit = least[num_stages][0]
    stages: list[StageLayers] = []
    for k in range(num_stages - 1, 0, -1):
        start = stages[-1].end if stages else 0
        end = next(end for end in range(start + 1, num_layers) if least[k].get(end, limit + 1) <= limit)
        stages.append(StageLayers(start, end))
    return [*stages, StageLayers(stages[-1].end if stages else 0, num_layers)]


class StagePass(NamedTuple):
    """A pass of a stage over a micro-batch."""

    kind: Literal["forward", "backward"]
    index: int
    """Index of the micro-batch."""


def one_forward_one_backward(stage: int, num_stages: int, num_micros: int) -> list[StagePass]:
    """Returns the passes of a stage over `num_micros` micro-batches, in the order of 1F1B."""
    num_ahead = min(num_stages - 1 - stage, num_micros)
    passes = [StagePass("forward", i) for i in range(num_ahead)]
    for i in range(num_ahead, num_micros):
        passes += [StagePass("forward", i), StagePass("backward", i - num_ahead)]
    return passes + [StagePass("backward", i) for i in range(num_micros - num_ahead, num_micros)]


def num_in_flight(stage: int, num_stages: int, num_micros: int) -> int:
    """Returns the largest number of micro-batches that a stage holds between their forward and backward pass."""
    return min(num_stages - stage, num_micros)


class StageCost(NamedTuple):
    """Time, or FLOPs, of the passes of a stage over a micro-batch."""

    forward: float
    backward: float

    def divide(self, count: int) -> "StageCost":
        return StageCost(self.forward / count, self.backward / count)


def finish_times(orders: Sequence[Sequence[StagePass]], costs: Sequence[StageCost]) -> list[dict[StagePass, float]]:
    """Returns the time at which each stage finishes each of its passes, without time for transfers.

    A forward pass waits for that of the stage before, and a backward pass for that of the stage after.

    Args:
        orders: passes of each stage, in their order.
        costs: cost of the passes of each stage.
    """
    finished: list[dict[StagePass, float]] = [{} for _ in orders]
    remaining = [deque(order) for order in orders]
    while any(remaining):
        num_before = sum(map(len, finished))
        for stage, passes in enumerate(remaining):
            now = max(finished[stage].values(), default=0.0)
            while passes:
                is_forward = passes[0].kind == "forward"
                other = stage - 1 if is_forward else stage + 1
                needed = finished[other].get(passes[0]) if 0 <= other < len(orders) else 0.0
                if needed is None:
                    break
                now = max(now, needed) + (costs[stage].forward if is_forward else costs[stage].backward)
                finished[stage][passes.popleft()] = now
        assert sum(map(len, finished)) > num_before, "a stage waits for a pass that never runs"
    return finished


def pipeline_seconds(costs: Sequence[StageCost], num_micros: int) -> float:
    """Returns the time of 1F1B over `num_micros` micro-batches. `costs` are those of each stage."""
    orders = [one_forward_one_backward(stage, len(costs), num_micros) for stage in range(len(costs))]
    return max((max(times.values(), default=0.0) for times in finish_times(orders, costs)), default=0.0)


def bubble(num_stages: int, num_micros: int) -> float:
    """Returns the share of the time in which a stage is idle, for stages of equal cost."""
    return (num_stages - 1) / (num_micros + num_stages - 1)
