"""The layers of stages, the order of their passes, and the time in which they are idle."""

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B

from flowrl.engines.train.pipeline.stage_schedule import (
    MAX_UNFINISHED,
    StageCost,
    StagePass,
    bubble,
    finish_times,
    num_in_flight,
    one_forward_one_backward,
    pipeline_seconds,
    split_layers,
)

SIZES = [(2, 1), (2, 5), (3, 2), (4, 3), (4, 4), (4, 9)]
"""Numbers of stages and of micro-batches."""


def counts(costs: list[int], num_stages: int, head: int = 0) -> list[int]:
    return [end - start for start, end in split_layers(costs, num_stages, head=head)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (5, 1, 3, [5]),
        (5, 2, 0, [2, 3]),
        (5, 2, 1, [3, 2]),  # a head that costs as much as half of a layer
        (7, 2, 6, [5, 2]),  # as much as three layers
        (5, 4, 0, [1, 1, 1, 2]),
        (8, 4, 4, [1, 3, 3, 1]),
        (4, 4, 100, [1, 1, 1, 1]),
    ],
)
def test_the_last_stage_has_fewer_layers_for_the_cost_of_the_head(
    num_layers: int, num_stages: int, head: int, expected: list[int]
) -> None:
    assert counts([2] * num_layers, num_stages, head) == expected


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 7), st.integers(0, 30))
def test_no_other_division_has_a_cheaper_most_expensive_stage(costs: list[int], num_stages: int, head: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = split_layers(costs, num_stages, head=head)
    assert stages[0].start == 0 and stages[-1].end == len(costs)
    assert all(stage.end == after.start for stage, after in pairwise(stages))

    def largest(bounds: tuple[int, ...]) -> int:
        starts, ends = (0, *bounds), (*bounds, len(costs))
        own = [sum(costs[start:end]) for start, end in zip(starts, ends, strict=True)]
        return max([*own[:-1], own[-1] + head])

    chosen = tuple(stage.start for stage in stages[1:])
    assert largest(chosen) == min(map(largest, combinations(range(1, len(costs)), num_stages - 1)))


@pytest.mark.parametrize(("num_stages", "num_micros"), [size for size in SIZES if size[1] >= size[0]])
def test_the_order_is_that_of_torch(num_stages: int, num_micros: int) -> None:
    """torch's indices of forward passes are wrong in the last stage (2.13), so only the kinds are compared."""
    sizes: Any = SimpleNamespace(_num_stages=num_stages, _n_microbatches=num_micros)
    order = Schedule1F1B._get_pipeline_order(sizes)
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    for stage in range(num_stages):
        actions = [action.computation_type.name for action in (order or {})[stage] if action is not None]
        expected = [kinds[name] for name in actions if name in kinds]
        assert expected and [own.kind for own in one_forward_one_backward(stage, num_stages, num_micros)] == expected


@pytest.mark.parametrize(("num_stages", "num_micros"), SIZES)
def test_a_stage_runs_each_pass_once_and_holds_few_micro_batches(num_stages: int, num_micros: int) -> None:
    for stage in range(num_stages):
        order = one_forward_one_backward(stage, num_stages, num_micros)
        assert sorted(order) == sorted(
            StagePass(kind, i) for kind in ("forward", "backward") for i in range(num_micros)
        )
        held = [sum(1 if own.kind == "forward" else -1 for own in order[: i + 1]) for i in range(len(order))]
        assert max(held) == num_in_flight(stage, num_stages, num_micros)
        assert held[-1] == 0


@pytest.mark.parametrize(("num_stages", "num_micros"), SIZES)
@pytest.mark.parametrize("cost", [StageCost(1, 1), StageCost(1, 2)])
def test_equal_stages_are_idle_for_the_bubble(num_stages: int, num_micros: int, cost: StageCost) -> None:
    orders = [one_forward_one_backward(stage, num_stages, num_micros) for stage in range(num_stages)]
    times = finish_times(orders, [cost] * num_stages)
    end = max(max(own.values()) for own in times)
    busy = num_micros * (cost.forward + cost.backward)
    assert 1 - busy / end == pytest.approx(bubble(num_stages, num_micros))
    assert bubble(num_stages, num_micros) == (num_stages - 1) / (num_micros + num_stages - 1)


def test_a_stage_waits_for_the_most_expensive_one() -> None:
    """Two micro-batches on stages of cost 1 + 2 and 2 + 4: the forward passes end at 1, 2 on the first stage, and at 3
    on the second, whose other passes follow without a pause: 7, 9, 13. The last backward pass ends at 15.
    """
    assert pipeline_seconds([StageCost(1, 2), StageCost(2, 4)], 2) == 15


@pytest.mark.parametrize(("num_stages", "num_micros"), [*SIZES, (8, 20)])
def test_no_stage_waits_forever_for_its_sends(num_stages: int, num_micros: int) -> None:
    """A send ends when the neighbor has received. A stage waits for a send before it starts `MAX_UNFINISHED` more."""
    orders = [one_forward_one_backward(stage, num_stages, num_micros) for stage in range(num_stages)]
    position = [0] * num_stages
    received: set[tuple[int, str, int]] = set()
    sent: set[tuple[int, str, int]] = set()
    while any(own < len(order) for own, order in zip(position, orders, strict=True)):
        before = list(position)
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            kind, i = order[position[stage]]
            step = 1 if kind == "forward" else -1
            has_source, has_target = 0 <= stage - step < num_stages, 0 <= stage + step < num_stages
            if has_source and (stage - step, kind, i) not in sent:
                continue
            received.add((stage, kind, i))
            oldest = (stage + step, kind, i - MAX_UNFINISHED)
            if has_target and i >= MAX_UNFINISHED and oldest not in received:
                continue
            sent.add((stage, kind, i))
            position[stage] += 1
        assert position != before, "all stages wait"
