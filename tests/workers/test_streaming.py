"""Streaming of prompt groups: complete groups are returned, with the rows that `generate` returns."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from flowrl.controller.errors import ProcessLost, WorkerError, WorkerUserError
from flowrl.workers import Actor, Rollout
from flowrl.workers.rollout import RESPONSE_COLUMNS
from recipes.moe.prepare import main as prepare_mixture

SAMPLES = 3
COLUMNS = (*RESPONSE_COLUMNS, "prompt_id", "sample")


@pytest.fixture
def rollout(model: ModelConfig) -> Iterator[WorkerGroup]:
    with Cluster(Placement(pools={"b": [1]}, roles={"rollout": "b"}), backend="inline", num_threads=1) as cluster:
        yield cluster.group("rollout", Rollout, config(), model, seed=0)


def config(**settings) -> RolloutConfig:
    return RolloutConfig(**{"max_response_tokens": 6, "temperature": 0.5, "max_num_seqs": 16, **settings})


def groups(*prompt_ids: int) -> Batch:
    """Returns all rows of these prompts."""
    rows = [(number, sample) for number in prompt_ids for sample in range(SAMPLES)]
    return Batch.from_rows(
        [{"prompt_ids": [2, 3, 5 + n % 10, 4, 14], "prompt_id": n, "sample": sample} for n, sample in rows]
    )


def polled(rollout: WorkerGroup, count: int) -> list[Batch]:
    """Polls until `count` groups are complete."""
    batches = []
    while sum(batch.num_rows for batch in batches) < count * SAMPLES:
        batches.append(rollout.poll(0.05))
    return batches


def by_row(batches: list[Batch]) -> dict[tuple[int, int], tuple]:
    """Returns (prompt_id, sample) -> all columns of the row."""
    columns_by_row = {}
    for batch in batches:
        lengths = batch.lengths().tolist()
        tokens = [
            [row.tolist() for row in batch.get(name).split(lengths)]
            for name in ("input_ids", "response_mask", "rollout_logprobs", "weight_version")
        ]
        rows = (batch.get("truncated").tolist(), batch.get("response"))
        names = zip(batch.get("prompt_id").tolist(), batch.get("sample").tolist(), strict=True)
        columns_by_row |= dict(zip(names, zip(*tokens, *rows, strict=True), strict=True))
    return columns_by_row


def test_complete_groups_equal_the_rows_of_generate(rollout: WorkerGroup) -> None:
    batch = groups(*range(20))
    expected = by_row([batch.union(rollout.generate(batch))])
    rollout.add(batch.rows(slice(0, 5 * SAMPLES)), SAMPLES)
    batches = polled(rollout, 2)
    rollout.add(batch.rows(slice(5 * SAMPLES, 20 * SAMPLES)), SAMPLES)
    batches += polled(rollout, 20 - sum(batch.num_rows for batch in batches) // SAMPLES)
    assert by_row(batches) == expected and len(batches) > 2
    for piece in batches:
        assert set(piece.columns) == set(COLUMNS)
        assert piece.get("sample").tolist() == list(range(SAMPLES)) * (piece.num_rows // SAMPLES)


def test_poll_without_requests_returns_no_rows_immediately(rollout: WorkerGroup) -> None:
    started = time.monotonic()
    batch = rollout.poll(600.0)
    assert batch.num_rows == 0 and set(batch.columns) == set(COLUMNS)
    assert batch.get("response") == [] and batch.get("input_ids").tolist() == []
    assert time.monotonic() - started < 60


def test_a_batch_without_rows_has_the_routes_of_no_tokens(tmp_path: Path) -> None:
    assert prepare_mixture(["--output", str(tmp_path / "model")]) == 0
    placement = Placement(pools={"b": [1]}, roles={"rollout": "b"})
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        model = ModelConfig(path=tmp_path / "model")
        rollout = cluster.group("rollout", Rollout, config(router_replay=True), model, seed=0)
        empty = rollout.poll(0.0)
        rollout.add(groups(1, 2), SAMPLES)
        batches = [empty, *polled(rollout, 2)]
        routes = [batch.get("routes") for batch in batches]
        assert [len(each) for each in routes] == [len(batch.get("input_ids")) for batch in batches]
    assert len(routes[0]) == 0
    assert len({(each.shape[1], each.dtype) for each in routes}) == 1 and routes[0].shape[1] > 0


def test_aborted_groups_are_not_returned(rollout: WorkerGroup) -> None:
    rollout.add(groups(*range(8)), SAMPLES)
    rollout.abort([1, 99])
    polled_first = rollout.poll(0.0).get("prompt_id").tolist()
    dropped = {1, 3} - {*polled_first}
    rollout.abort(list(dropped))
    batches = polled(rollout, 8 - len(dropped) - len({*polled_first}))
    assert sorted([*polled_first, *(n for batch in batches for n in batch.get("prompt_id").tolist())]) == sorted(
        n for n in range(8) if n not in dropped for _ in range(SAMPLES)
    )
    rollout.add(groups(1), SAMPLES)
    rollout.abort_all()
    assert rollout.poll(0.0).num_rows == 0
    rollout.add(groups(1), SAMPLES)
    assert set(polled(rollout, 1)[-1].get("prompt_id").tolist()) == {1}


def test_generate_runs_while_groups_are_streaming(rollout: WorkerGroup) -> None:
    batch, held_out = groups(*range(6)), groups(*range(30, 34))
    expected = by_row([batch.union(rollout.generate(batch))])
    greedy_ids = rollout.generate(held_out, temperature=0.0).get("input_ids").tolist()
    rollout.add(batch, SAMPLES)
    batches = [rollout.poll(0.0)]
    assert rollout.generate(held_out, temperature=0.0).get("input_ids").tolist() == greedy_ids
    assert by_row(batches + polled(rollout, 6 - batches[0].num_rows // SAMPLES)) == expected


def evaluated(rollout: WorkerGroup, held_out: Batch, temperature: float) -> tuple[Batch, list[Batch]]:
    """Evaluates while groups are polled. Returns the evaluation, and the other batches."""
    rollout.start_evaluation(held_out, temperature).get()
    batches = []
    while not (batch := rollout.poll_evaluation(0.001)).num_rows:
        batches.append(rollout.poll(0.001))
    return batch, batches


@pytest.mark.parametrize("max_num_seqs", [16, 1])
def test_an_evaluation_runs_while_groups_are_streaming(model: ModelConfig, max_num_seqs: int) -> None:
    batch, held_out = groups(*range(6)), groups(*range(30, 34))
    with Cluster(Placement(pools={"b": [1]}, roles={"rollout": "b"}), backend="inline", num_threads=1) as cluster:
        settings = config(max_num_seqs=max_num_seqs)
        rollout: WorkerGroup = cluster.group("rollout", Rollout, settings, model, seed=0)
        expected = by_row([batch.union(rollout.generate(batch))])
        expected_evaluation = by_row([held_out.union(rollout.generate(held_out, temperature=0.9))])
        rollout.add(batch, SAMPLES)
        evaluation, batches = evaluated(rollout, held_out, 0.9)
        assert by_row([held_out.union(evaluation)]) == expected_evaluation
        assert set(evaluation.columns) == set(RESPONSE_COLUMNS)
        assert len(batches) > 2 and rollout.poll_evaluation(600.0).num_rows == 0
        num_groups = sum(piece.num_rows for piece in batches) // SAMPLES
        assert by_row(batches + polled(rollout, 6 - num_groups)) == expected


def test_abort_all_and_a_second_start_end_an_evaluation(rollout: WorkerGroup) -> None:
    first, second = groups(1, 2), groups(3)
    rollout.start_evaluation(first, 0.0).get()
    rollout.poll_evaluation(0.0)
    rollout.start_evaluation(second, 0.0).get()
    evaluation, _ = evaluated(rollout, second, 0.0)
    expected = rollout.generate(second, temperature=0.0).get("input_ids").tolist()
    assert evaluation.get("input_ids").tolist() == expected
    rollout.start_evaluation(first, 0.0).get()
    rollout.abort_all().get()
    assert rollout.poll_evaluation(600.0).num_rows == 0


def evaluated_ids(worker: Rollout) -> set[str]:
    assert worker._evaluation is not None
    return {episode.id for episode in worker._evaluation.own}


def test_the_requests_of_every_batch_have_ids_of_their_own(rollout: WorkerGroup) -> None:
    """An engine may run the batches of an evaluation and of `generate` at the same time."""
    batches = [groups(1, 2), groups(1, 2), groups(3)]
    ids = []
    for batch in batches:
        rollout.start_evaluation(batch, 0.0).get()
        ids += rollout.run(evaluated_ids)[0]
    assert len(set(ids)) == len(ids) == sum(map(len, batches))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_groups_continue_with_new_weights_between_polls(model: ModelConfig, quantization: str | None) -> None:
    split = Placement(pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    with Cluster(split, backend="inline", num_threads=1) as cluster:
        actor = cluster.group("actor", Actor, actor_config(model))
        rollout = cluster.group("rollout", Rollout, config(max_num_seqs=4, quantization=quantization), model, seed=0)
        rollout.add(groups(*range(6)), SAMPLES)
        batches, version = [], 0
        while sum(batch.num_rows for batch in batches) < 6 * SAMPLES:
            batches.append(rollout.poll(0.0))
            version += 1
            weights = actor.weights().get()
            half = dict(list(weights.items())[:3])
            rollout.load_weights(half, version, 0, 2)
            assert rollout.poll(0.0).num_rows == 0, "no generation during an update"
            rollout.load_weights({n: w for n, w in weights.items() if n not in half}, version, 1, 2)
        versions = [[version for version in row[3] if version >= 0] for row in by_row(batches).values()]
    assert all(row == list(range(row[0], row[0] + len(row))) for row in versions)
    assert len({row[0] for row in versions}) > 2 and max(map(len, versions)) > 1


def actor_config(model: ModelConfig) -> ActorConfig:
    return ActorConfig.model_validate({"model": model, "optimizer": OptimizerConfig(lr=0.01), "temperature": 0.5})


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_streaming_with_shared_weights_is_rejected(model: ModelConfig, quantization: str | None) -> None:
    together = Placement(pools={"main": [1]}, roles={"actor": "main", "rollout": "main"})
    with Cluster(together, backend="inline", num_threads=1) as cluster:
        cluster.group("actor", Actor, actor_config(model))
        rollout = cluster.group("rollout", Rollout, config(quantization=quantization), model, seed=0)
        with pytest.raises(WorkerUserError, match=r"schedule\.kind"):
            rollout.add(groups(1), SAMPLES).get()


def test_a_prompt_that_is_too_long_is_rejected_without_the_others(rollout: WorkerGroup) -> None:
    prompts = {1: [2, 3, 4], 2: [2] * 600, 3: [2, 3, 4]}
    rows = [(number, sample) for number in prompts for sample in range(SAMPLES)]
    batch = Batch.from_rows([{"prompt_ids": prompts[n], "prompt_id": n, "sample": sample} for n, sample in rows])
    (rejections,) = rollout.add(batch, SAMPLES).get()
    assert rejections.keys() == {1, 2, 3} and rejections[1] is None and rejections[3] is None
    assert "606" in rejections[2]
    batches = polled(rollout, 2)
    assert sorted(n for batch in batches for n in batch.get("prompt_id").tolist()) == [1] * SAMPLES + [3] * SAMPLES
    assert rollout.poll(0.0).num_rows == 0


def test_an_incomplete_group_is_rejected(rollout: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"prompt 2 .*\b2\b"):
        rollout.add(groups(1, 2).rows(slice(0, 5)), SAMPLES).get()


def process_id(worker: Rollout) -> int:
    return os.getpid()


@pytest.mark.slow
def test_groups_of_a_lost_replica_can_be_added_again(model: ModelConfig, ray_session: None) -> None:
    placement = Placement(device="cpu", pools={"b": [2]}, roles={"rollout": "b"})
    with Cluster(placement, num_threads=1) as cluster:
        rollout = cluster.group("rollout", Rollout, config(), model, seed=0)
        expected = by_row([groups(*range(8)).union(rollout.generate(groups(*range(8))))])
        replicas = [rollout.replica(0), rollout.replica(1)]
        lost = rollout.run(process_id)[1]
        for rank, replica in enumerate(replicas):
            replica.add(groups(*range(4 * rank, 4 * rank + 4)), SAMPLES).get()
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(ProcessLost, match=r"rollout\.poll .*rank 1\b"):
            replicas[1].poll(600.0).get("prompt_id")
        # The retried call runs once the process has recovered.
        assert rollout.run(process_id)[1] != lost
        replicas[1].add(groups(*range(4, 8)), SAMPLES).get()
        batches = [batch for replica in replicas for batch in polled(replica, 4)]
        assert by_row(batches) == expected
