"""Known defects of other single-controller frameworks, which must not occur here."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from flowrl import Batch, ContractError, Placement
from flowrl.controller.placement.plan import Inventory, PlacementError, plan
from tests.conftest import BackendName, ClusterMaker
from tests.controller.conftest import Shared
from tests.controller.workers import Arithmetic
from tests.slow_cases import INLINE_BY_DEFAULT

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entries", [2, 4])
def test_lists_are_never_split_by_their_length(shared: Shared, entries: int):
    """The dispatch mode decides what is split; a wrong number of entries is an error."""
    assert shared.first.own_entry([10, 11, 12]) == [(0, 10), (1, 11), (2, 12)]
    with pytest.raises(ContractError, match=r"'x'.*3"):
        shared.first.own_entry(list(range(entries)))
    assert shared.first.options([1, 2, 3]) == [{"x": [1, 2, 3]}] * 3


def test_rows_that_do_not_divide_evenly_are_counted_without_waiting(shared: Shared):
    batch = Batch.from_columns({"x": list(range(10))})
    result = shared.first.scaled.submit(batch)
    assert result.num_rows == 10
    assert result.get("y").tolist() == [2 * x for x in range(10)]


def test_the_batch_of_the_caller_is_not_modified(shared: Shared):
    batch = Batch.from_columns({"x": list(range(10))})
    shared.first.scaled(batch).get("y")
    assert batch.columns == ("x",) and batch.get("x").tolist() == list(range(10))


def test_fewer_rows_than_ranks_are_supported(shared: Shared):
    assert shared.first.scaled(Batch.from_columns({"x": [3]})).get("y").tolist() == [6]


@pytest.mark.slow
def test_a_rank_receives_only_its_rows_and_columns(ray_session: None, open_cluster: ClusterMaker):
    cluster = open_cluster("ray", {"main": [2], "next": [2]}, {"writer": "main", "reader": "next"}, num_threads=1)
    writer, reader = cluster.group("writer", Arithmetic), cluster.group("reader", Arithmetic)
    batch = Batch.from_columns({"x": torch.arange(100_000), "z": torch.arange(100_000)})
    scaled = writer.scaled(batch).rename({"y": "x"})
    assert reader.received_bytes(scaled.union(batch.select("z"))) == 8 * 100_000


def test_all_arguments_can_be_passed_by_name(shared: Shared):
    assert shared.first.share(x=[1, 2, 3]) == [(0, 2), (1, 4), (2, 6)]
    assert shared.first.scaled(table=Batch.from_columns({"x": [1]}), shift=1).get("y").tolist() == [3]


def test_devices_of_uneven_nodes_are_counted_per_node():
    placement = Placement(pools={"main": [1, 2]}, roles={"actor": "main"})
    role = plan(placement, Inventory((2, 2), "cuda")).roles["actor"]
    assert [(slot.node, role.local_rank(rank)) for rank, slot in enumerate(role.slots)] == [(0, 0), (1, 0), (1, 1)]
    assert role.mesh.size == 3
    with pytest.raises(PlacementError, match=r"placement\.pools\.main"):
        plan(placement, Inventory((1, 1), "cuda"))


@INLINE_BY_DEFAULT
def test_roles_whose_names_contain_each_other_are_distinguished(backend: BackendName, open_cluster: ClusterMaker):
    roles = ["actor", "actor_rollout", "rollout", "actor_rollout_ref"]
    cluster = open_cluster(backend, {"main": [1]}, dict.fromkeys(roles, "main"))
    groups = {role: cluster.group(role, Arithmetic, factor) for factor, role in enumerate(roles, start=1)}
    assert [group.share([10])[0][1] for group in groups.values()] == [10, 20, 30, 40]
    assert groups["actor"].peer_factor("rollout") == [3]


def test_the_caller_chooses_whether_a_call_blocks(shared: Shared):
    assert not isinstance(shared.first.identify(), type(shared.first.identify.submit()))
    assert shared.first.identify.submit().get() == shared.first.identify()


def test_methods_have_signatures(shared: Shared):
    assert list(inspect.signature(shared.first.scaled).parameters) == ["table", "shift"]


@pytest.mark.slow
def test_two_runs_on_one_cluster_are_isolated(ray_session: None, open_cluster: ClusterMaker):
    """Names are unique per run, and ports are chosen by binding them."""
    clusters = [open_cluster("ray", {"main": [1]}, {"actor": "main"}, num_threads=1) for _ in range(2)]
    first, second = (cluster.group("actor", Arithmetic, factor) for factor, cluster in enumerate(clusters, start=1))
    assert (first.share([1]), second.share([1])) == ([(0, 1)], [(0, 2)])
    assert first.process_id() != second.process_id()


PRIVATE_PARTS_OF_RAY = {
    "local_ray.py: ray._private": "the address on which a local Ray listens has no public setting",
    "local_ray.py: ray._raylet": "Ray keeps the first token of a process, and only this class forgets it",
    "ray_nodes.py: ray._private": "the address that `auto` names has no public function",
    "ray_nodes.py: ray._private.authentication.authentication_utils": "RAY_AUTH_MODE has a default that only Ray knows",
    "ray_nodes.py: ray._private.grpc_utils": "`ray.init` retries for 40 s if a cluster rejects a token",
    "ray_backend.py: ray._private.worker": "Ray prints its own messages, and has no setting for their destination",
    "ray_backend.py: ray._private.state": "without the dashboard, no public function tells why a process has ended",
    "ray_backend.py: ray.core.generated.common_pb2": "its values are the reasons of ended processes",
    "ray_backend.py: ray.core.generated.gcs_pb2": "the table of ended processes consists of its messages",
}
"""Use -> reason."""


def test_only_public_parts_of_ray_are_used():
    strays, private = [], ("ray._", "ray.experimental", "ray.core")
    sources = {path: path.read_text() for path in (ROOT / "flowrl").rglob("*.py")}
    for path, source in sources.items():
        if not any(name in source for name in private):
            continue
        for node in ast.walk(ast.parse(source)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            strays += [f"{path.name}: {n}" for n in names if n.startswith(private) and n != "ray.__file__"]
    assert sorted(set(strays)) == sorted(PRIVATE_PARTS_OF_RAY)
