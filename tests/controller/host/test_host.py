"""A host checks inputs, result and contract of every method."""

import pytest

from flowrl import Batch, WorkerError
from flowrl.controller.errors import WorkerUserError
from tests.conftest import BackendName, ClusterMaker
from tests.controller.workers import Wrong

BROKEN = [
    ("misnamed", r"writes=\(y\).*\bz\b"),
    ("short", r"rows='same'.*\b3\b.*\b2\b"),
    ("not_thrice", r"rows=3\b.*\b9\b.*\b6\b"),
    ("not_a_table", r"TensorDict.*\blist\b"),
    ("overwrites_input", r"'x' .*'table'.*\bclone\b"),
]


def batch() -> Batch:
    return Batch.from_columns({"x": [1, 2, 3]})


@pytest.mark.parametrize(("method", "pattern"), BROKEN)
def test_a_broken_contract_is_named(open_cluster: ClusterMaker, method: str, pattern: str):
    group = open_cluster("inline", {"main": [1]}, {"actor": "main"}).group("actor", Wrong)
    with pytest.raises(WorkerError, match=rf"actor\.{method} .*rank 0 .*node 0\b.*ContractError: .*{pattern}"):
        getattr(group, method)(batch())


@pytest.mark.parametrize("made_by", ["driver by value", "driver by reference"])
def test_a_write_into_an_input_is_rejected_in_another_process(
    ray_session: None, open_cluster: ClusterMaker, made_by: str
):
    group = open_cluster("ray", {"main": [1]}, {"actor": "main"}).group("actor", Wrong)
    rows = batch() if made_by == "driver by value" else Batch.from_columns({"x": list(range(20_000))})
    with pytest.raises(WorkerError, match=r"ContractError: .*'x'"):
        group.overwrites_input(rows)
    assert rows.rows([0, 1, 2]).get("x").tolist() == ([1, 2, 3] if made_by == "driver by value" else [0, 1, 2])


@pytest.mark.slow
def test_a_broken_contract_in_another_process_is_named(ray_session: None, open_cluster: ClusterMaker):
    group = open_cluster("ray", {"main": [2]}, {"actor": "main"}).group("actor", Wrong)
    with pytest.raises(WorkerError, match=r"actor\.misnamed .*rank \d .*writes=\(y\).*\bz\b"):
        group.misnamed(batch())


def test_token_columns_of_different_lengths_are_a_user_error(backend: BackendName, open_cluster: ClusterMaker):
    group = open_cluster(backend, {"main": [1]}, {"actor": "main"}).group("actor", Wrong)
    columns = Batch.from_columns(tokens={"ids": [1, 2, 3]}, lengths=[1, 2])
    columns["others"] = Batch.from_columns(tokens={"others": [1, 2, 3]}, lengths=[2, 1])
    with pytest.raises(WorkerUserError, match=r"^actor: .*\bids\b.*\bothers\b"):
        group.misaligned(columns)
