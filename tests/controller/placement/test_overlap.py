"""Overlap of calls under two placements, which follows from the columns that they read and from the pools."""

from pathlib import Path

import pytest

from flowrl import Batch, Cluster, Placement
from flowrl.data.events import CallEvent
from flowrl.report.trace import busy_fractions
from tests.controller.sleeping_workers import Meeting

COLOCATED = Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main", "critic": "main"})
SPLIT = Placement(device="cpu", pools={"policy": [1], "judges": [1]}, roles={"actor": "policy", "critic": "judges"})


def step(placement: Placement, folder: Path, *, meets: bool) -> list[CallEvent]:
    """Runs the calls of a PPO step: two evaluations that need only the prompts, then two updates.

    With `meets`, each call waits until the call of the other role runs, too.
    """
    with Cluster(placement, num_threads=1) as cluster:
        actor = cluster.group("actor", Meeting, folder, "critic" if meets else None)
        critic = cluster.group("critic", Meeting, folder, "actor" if meets else None)
        batch = Batch.from_rows([{"x": i} for i in range(4)])
        batch["old_logprobs"] = actor.values(batch)
        batch["values"] = critic.values(batch)
        updates = critic.update(batch), actor.update(batch)
        assert [update.get()["rows"].result() for update in updates] == [4, 4]
        cluster.wait_for_calls()
        return [event for event in cluster.calls.events if event.method in ("values", "update")]


def overlap_ns(events: list[CallEvent], method: str) -> float:
    """Returns the nanoseconds in which the first ranks of actor and critic ran the method concurrently."""
    actor, critic = (
        next(e for e in events if (e.role, e.method, e.rank) == (r, method, 0)) for r in ("actor", "critic")
    )
    return min(actor.ended_ns, critic.ended_ns) - max(actor.started_ns, critic.started_ns)


@pytest.mark.slow
def test_updates_and_evaluations_overlap_on_separate_pools(ray_session: None, tmp_path: Path) -> None:
    events = step(SPLIT, tmp_path, meets=True)
    assert overlap_ns(events, "values") > 0
    assert overlap_ns(events, "update") > 0
    busy = busy_fractions(events, min(e.started_ns for e in events), max(e.ended_ns for e in events))
    assert set(busy) == {"node0/cpu:0", "node0/cpu:1"}
    assert all(0 < fraction <= 1 for fraction in busy.values())


def test_roles_of_one_pool_do_not_overlap(ray_session: None, tmp_path: Path) -> None:
    events = step(COLOCATED, tmp_path, meets=False)
    assert overlap_ns(events, "values") <= 0
    assert overlap_ns(events, "update") <= 0
