"""Every rank gets its own device, or the placement is rejected with an error."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config import Placement, ReplicaSizes, RolePlacement, load
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import Coordinates, Inventory, Mesh, PlacementError, Plan, plan
from flowrl.controller.placement.plan_table import render_plan, render_threads
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.errors import rejects

SHIPPED = Path(__file__).parents[3] / "placement"


def gpus(*nodes: int) -> Inventory:
    return Inventory(nodes, "cuda")


def devices_of(planned: Plan, role: str) -> list[tuple[int, int]]:
    """Returns (node, device) of each rank of `role`."""
    return [(slot.node, slot.device) for slot in planned.slots(role)]


def shipped(name: str) -> Placement:
    return load(SHIPPED / f"{name}.yaml", [], Placement)


def test_single_puts_every_role_on_one_device() -> None:
    planned = plan(shipped("single"), gpus(8), PPOConfig.possible_roles())
    assert {role: devices_of(planned, role) for role in planned.roles} == {
        role: [(0, 0)] for role in PPOConfig.possible_roles()
    }


def test_colocated_puts_every_role_on_every_device() -> None:
    planned = plan(shipped("colocated"), gpus(2, 1), PPOConfig.possible_roles())
    assert devices_of(planned, "actor") == devices_of(planned, "critic") == [(0, 0), (0, 1), (1, 0)]


def test_split_halves_every_node() -> None:
    planned = plan(shipped("split"), gpus(4, 2), PPOConfig.possible_roles())
    assert devices_of(planned, "actor") == devices_of(planned, "rollout") == [(0, 0), (0, 1), (1, 0)]
    assert devices_of(planned, "critic") == devices_of(planned, "reward") == [(0, 2), (0, 3), (1, 1)]


def test_standalone_gives_every_role_its_own_device() -> None:
    roles = ("actor", "rollout", "reference", "critic", "reward")
    planned = plan(shipped("standalone"), gpus(3, 2), roles)
    assert [devices_of(planned, role) for role in roles] == [[(0, 0)], [(0, 1)], [(0, 2)], [(1, 0)], [(1, 1)]]


def test_a_role_that_the_recipe_does_not_use_has_no_device() -> None:
    planned = plan(shipped("standalone"), gpus(4), GRPOConfig.possible_roles())
    assert "critic" not in planned.roles and "critic" not in planned.pools


def test_counts_per_node_are_ranked_node_by_node() -> None:
    planned = plan(Placement(pools={"main": [2, 2]}, roles={"actor": "main"}), gpus(2, 2))
    assert [(slot.rank, slot.node, slot.local_rank, slot.device) for slot in planned.slots("actor")] == [
        (0, 0, 0, 0),
        (1, 0, 1, 1),
        (2, 1, 0, 0),
        (3, 1, 1, 1),
    ]


def test_a_pool_goes_to_the_first_node_with_room() -> None:
    planned = plan(Placement(pools={"a": [3], "b": [2]}, roles={"actor": "a", "critic": "b"}), gpus(4, 4))
    assert devices_of(planned, "critic") == [(1, 0), (1, 1)]


def test_data_parallel_size_is_devices_divided_by_the_other_sizes() -> None:
    roles = {"actor": RolePlacement(pool="main", tp=2, pp=2)}
    assert plan(Placement(pools={"main": [8]}, roles=roles), gpus(8)).roles["actor"].mesh == Mesh(
        pp=2, dp=2, sp=1, tp=2
    )


@pytest.mark.parametrize(
    ("per_node", "sizes", "shard_ranks"),
    [
        ([8], {}, 8),
        ([8, 8], {}, 8),
        ([8, 8], {"tp": 2}, 4),
        ([4, 4], {"tp": 2, "sp": 2}, 2),  # with one rank per node, sharding needs the network
        ([8, 4], {}, 12),
        ([1, 1, 1], {}, 3),
    ],
)
def test_a_model_is_sharded_over_the_ranks_of_a_node(
    per_node: list[int], sizes: dict[str, int], shard_ranks: int
) -> None:
    roles = {"actor": RolePlacement.model_validate({"pool": "main"} | sizes)}
    mesh = plan(Placement(pools={"main": per_node}, roles=roles), gpus(*per_node)).roles["actor"].mesh
    assert (mesh.shard_ranks(None), mesh.shard_ranks(1)) == (shard_ranks, 1)


def test_a_model_is_sharded_over_all_ranks_if_the_pools_of_a_role_alternate_between_nodes() -> None:
    pools = {"a": [2, 2], "b": [2, 2]}
    planned = plan(Placement(pools=pools, roles={"actor": "a+b"}), gpus(4, 4))
    assert planned.roles["actor"].mesh.shard_ranks(None) == 8


def test_tensor_parallel_peers_are_neighbors() -> None:
    mesh = Mesh(pp=2, dp=3, sp=2, tp=2)
    assert mesh.size == 24 and mesh.rank(Coordinates(pp=1, dp=2, sp=0, tp=1)) == ((1 * 3 + 2) * 2 + 0) * 2 + 1
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(24)] == list(range(24))


@pytest.mark.parametrize(
    ("pools", "roles", "facts"),
    [
        ({"main": [1]}, {"rollout": "main"}, ["placement.roles.actor", "main"]),
        ({"main": [1]}, {"actor": "mian"}, ["placement.roles.actor", "mian", "main"]),
        ({"main": [1]}, {"actor": "main", "acto": "main"}, ["placement.roles.acto", "actor"]),
        ({"main": [0]}, {"actor": "main"}, ["placement.pools.main", 0, "empty"]),
        ({"main": []}, {"actor": "main"}, ["placement.pools.main", "empty"]),
        ({"main": [1], "b": [1]}, {"actor": "main"}, ["placement.pools.b", "placement.roles"]),
        ({"main": "1/2"}, {"actor": "main"}, ["placement.pools.main", "1/2", 3, 2]),
        ({"main": "3/2"}, {"actor": "main"}, ["placement.pools.main", "3/2"]),
        ({"main": [4]}, {"actor": "main"}, ["placement.pools.main", 4, 3]),
        ({"main": [1, 1]}, {"actor": "main"}, ["placement.pools.main", 1, 2]),
        ({"main": "all"}, {"actor": {"pool": "main", "tp": 2}}, ["placement.roles.actor", "tp", 2, 3, "main"]),
    ],
)
def test_impossible_placements_are_rejected_by_setting(pools: dict, roles: dict, facts: list) -> None:
    with rejects(*facts, error=PlacementError) as caught:
        plan(Placement(pools=pools, roles=roles), gpus(3), ["actor"])
    assert str(caught.value).startswith(f"{facts[0]} ")


def test_overlapping_pools_are_rejected() -> None:
    placement = Placement(pools={"a": [2], "b": "all"}, roles={"actor": "a", "critic": "b"})
    with rejects("placement.pools.b", 4, 2, error=PlacementError):
        plan(placement, gpus(4))


def test_a_cuda_placement_without_a_gpu_is_rejected() -> None:
    with rejects("cuda", "placement.device", "cpu", error=PlacementError):
        plan(shipped("split"), gpus(0))


def test_unstated_cpu_slots_are_not_limited() -> None:
    planned = plan(shipped("standalone"), Inventory((2,), "cpu", bounded=False))
    assert devices_of(planned, "reward") == [(0, 4)]


def test_a_share_of_an_odd_number_of_cores_is_rounded_down_to_at_least_one() -> None:
    planned = plan(shipped("split"), Inventory((1,), "cpu", bounded=False))
    assert devices_of(planned, "actor") + devices_of(planned, "critic") == [(0, 0), (0, 1)]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pools_are_disjoint_and_inside_the_inventory_or_rejected(nodes: list[int], sizes: list[int]) -> None:
    names = [f"pool{index}" for index in range(len(sizes))]
    placement = Placement(pools={n: [s] for n, s in zip(names, sizes, strict=True)}, roles={n: n for n in names})
    try:
        planned = plan(placement, gpus(*nodes))
    except PlacementError:
        # Rejected only if every node has fewer than 4 free devices.
        assert max(sizes) > max(nodes) or sum(sizes) > sum(nodes) - 3 * len(nodes)
        return
    devices = [device for name in names for device in devices_of(planned, name)]
    assert len(set(devices)) == len(devices) == sum(sizes)
    assert all(device < nodes[node] for node, device in devices)


def test_the_table_has_a_row_per_role_and_a_column_per_device() -> None:
    roles = ("actor", "rollout", "reference", "reward")
    table = render_plan(plan(shipped("split"), gpus(2, 2), roles)).splitlines()
    assert table[1].split() == ["role", "pool", "mesh", "0:0", "0:1", "1:0", "1:1"]
    assert table[2].split() == ["actor", "policy", "dp2", "0", ".", "1", "."]
    assert table[5].split() == ["reward", "judges", "dp2", ".", "0", ".", "1"]


def test_stated_devices_are_a_limit() -> None:
    assert local_inventory("cpu", [3]) == Inventory((3,), "cpu", bounded=True)


def test_stated_cuda_devices_need_not_exist_on_this_machine() -> None:
    assert local_inventory("cuda", [8, 8]) == Inventory((8, 8), "cuda")


def test_unstated_cores_are_not_limited() -> None:
    inventory = local_inventory("cpu")
    assert inventory.nodes[0] >= 1 and not inventory.bounded


def test_a_rendered_plan_reports_idle_devices() -> None:
    one = Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"})
    assert render_plan(plan(one, Inventory((8,), "cpu"))).startswith("1 of 8 CPU devices;")
    assert render_plan(plan(one, Inventory((2,), "cpu", bounded=False))).startswith("1 CPU device;")


SHARED_POOLS = {"main": [4], "side": [2]}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("main[0:2]", [("main", 0), ("main", 1)]),
        ("main[2:]", [("main", 2), ("main", 3)]),
        ("main[:1]+main[3:]", [("main", 0), ("main", 3)]),
        ("main[3:4]+side", [("main", 3), ("side", 0), ("side", 1)]),
        ("side + main[:1]", [("main", 0), ("side", 0), ("side", 1)]),
    ],
)
def test_a_role_uses_some_ranks_of_a_pool_or_several_pools(where: str, expected: list[tuple[str, int]]) -> None:
    planned = plan(Placement(pools=SHARED_POOLS, roles={"actor": where, "critic": "main", "reward": "side"}), gpus(8))
    assert [(slot.pool, slot.rank) for slot in planned.slots("actor")] == expected
    assert planned.roles["actor"].mesh.dp == len(expected)


@pytest.mark.parametrize(
    ("ranks", "facts"),
    [
        ("main[0:5]", ["placement.roles.actor", "main", "0:5", 0, 3, "0:4"]),
        ("main[2:2]", ["placement.roles.actor", "main", "2:2", 0, 3, "0:4"]),
        ("main[0:3]+main[2:4]", ["placement.roles.actor", "main", "0:3", "2:4", "twice"]),
        ("main+sid", ["placement.roles.actor", "main", "sid", "side"]),
    ],
)
def test_missing_ranks_are_rejected(ranks: str, facts: list) -> None:
    placement = Placement(pools=SHARED_POOLS, roles={"actor": ranks, "critic": "main", "reward": "side"})
    with rejects(*facts, error=PlacementError):
        plan(placement, gpus(8))


def test_pools_that_a_role_spans_are_one_failure_group() -> None:
    roles = {"actor": "a+b", "critic": "b[1:2]", "reward": "c"}
    planned = plan(Placement(pools={"a": [1], "b": [2], "c": [1]}, roles=roles), gpus(4))
    sets = {group.name: [(slot.pool, slot.rank) for slot in group.slots] for group in planned.failure_groups()}
    assert sets == {"a+b": [("a", 0), ("b", 0), ("b", 1)], "c": [("c", 0)]}


def test_local_ranks_count_on_each_node() -> None:
    planned = plan(Placement(pools={"main": [2, 1, 3]}, roles={"actor": "main[1:5]", "critic": "main"}), gpus(2, 1, 3))
    role = planned.roles["actor"]
    assert [(slot.node, role.local_rank(rank)) for rank, slot in enumerate(role.slots)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
    ]


def test_the_table_shows_the_ranks_of_the_role() -> None:
    planned = plan(Placement(pools={"main": [3]}, roles={"actor": "main", "critic": "main[1:]"}), gpus(3))
    assert render_plan(planned).splitlines()[-1].split() == ["critic", "main[1:]", "dp2", ".", "0", "1"]


def test_a_dedicated_role_has_its_own_processes_on_the_devices_of_its_pool() -> None:
    planned = plan(Placement(pools={"main": [2, 1]}, roles=dict.fromkeys(("actor", "rollout"), "main")), gpus(2, 1))
    assert [slot.num_devices for slot in planned.slots("actor")] == [1, 1, 1]
    planned = plan(
        Placement(pools={"main": [2, 1]}, roles=dict.fromkeys(("actor", "rollout"), "main")),
        gpus(2, 1),
        dedicated=["rollout"],
    )
    assert devices_of(planned, "rollout") == devices_of(planned, "actor") == [(0, 0), (0, 1), (1, 0)]
    assert [(slot.pool, slot.rank, slot.owner, slot.num_devices) for slot in planned.slots("rollout")] == [
        ("main/rollout", rank, "main", 0.5) for rank in range(3)
    ]
    assert [slot.num_devices for slot in planned.slots("actor")] == [0.5, 0.5, 0.5]
    assert [group.name for group in planned.failure_groups()] == ["main", "main/rollout"]


def test_a_dedicated_role_alone_on_its_pool_has_full_devices() -> None:
    placement = Placement(pools={"main": [2], "makers": [1]}, roles={"actor": "main", "rollout": "makers"})
    planned = plan(placement, gpus(3), dedicated=["rollout"])
    assert [(slot.device, slot.num_devices) for slot in planned.slots("rollout")] == [(2, 1)]
    assert [slot.num_devices for slot in planned.slots("actor")] == [1, 1]


def test_one_process_leads_the_tensor_parallel_devices_of_a_replica() -> None:
    roles = {"actor": "main", "rollout": RolePlacement(pool="makers", tp=2)}
    planned = plan(Placement(pools={"main": [1], "makers": [4]}, roles=roles), gpus(5), dedicated=["rollout"])
    rollout = planned.roles["rollout"]
    assert (rollout.mesh, rollout.replica) == (Mesh(pp=1, dp=2, sp=1, tp=1), ReplicaSizes(tp=2))
    assert [(slot.rank, slot.device, slot.num_devices) for slot in rollout.slots] == [(0, 1, 2), (1, 3, 2)]
    assert render_plan(planned).splitlines()[-1].split()[2:4] == ["dp2", "tp2"]


def test_one_process_leads_the_stages_of_a_replica() -> None:
    roles = {"actor": "main", "rollout": RolePlacement(pool="makers", tp=2, pp=2)}
    planned = plan(Placement(pools={"main": [1], "makers": [8]}, roles=roles), gpus(9), dedicated=["rollout"])
    rollout = planned.roles["rollout"]
    assert (rollout.mesh, rollout.replica) == (Mesh(pp=1, dp=2, sp=1, tp=1), ReplicaSizes(tp=2, pp=2))
    assert [slot.node_devices for slot in rollout.slots] == [
        tuple((0, device) for device in devices) for devices in ((1, 2, 3, 4), (5, 6, 7, 8))
    ]
    assert render_plan(planned).splitlines()[-1].split()[2:5] == ["dp2", "pp2", "tp2"]


def test_a_replica_on_several_nodes_has_a_follower_on_each_further_node() -> None:
    """The stages of a replica are on different nodes, and the ranks of a stage on one node."""
    roles = {"actor": "main", "rollout": RolePlacement(pool="makers", tp=2, pp=2)}
    placement = Placement(pools={"main": [4], "makers": [2, 2, 2, 2]}, roles=roles)
    planned = plan(placement, gpus(4, 2, 2, 2, 2), dedicated=["rollout"])
    rollout = planned.roles["rollout"]
    assert (rollout.mesh.size, rollout.replica) == (2, ReplicaSizes(tp=2, pp=2))
    assert [slot.node_devices for slot in rollout.slots] == [
        ((1, 0), (1, 1), (2, 0), (2, 1)),
        ((3, 0), (3, 1), (4, 0), (4, 1)),
    ]
    for leader in rollout.slots:
        (follower,) = leader.followers
        assert (follower.node, follower.num_devices, follower.owner) == (leader.node + 1, 2, "makers")
        assert (leader.num_devices, follower.followers) == (2, ())
    assert planned.count_processes()[1] == 1
    assert render_plan(planned).splitlines()[-1].split()[2:5] == ["dp2", "pp2", "tp2"]


@pytest.mark.parametrize(
    ("pools", "where", "facts"),
    [
        ({"main": [1], "makers": [1, 1]}, {"pool": "makers", "tp": 2}, ["tp", 2, "nodes", "pp"]),
        ({"main": [1], "makers": [1, 2]}, {"pool": "makers", "pp": 3}, ["pp", 3, "nodes", 1, 2, "makers"]),
        ({"main": [2, 2]}, {"pool": "main", "pp": 4}, ["pp", 4, 2, "nodes", "pool"]),
    ],
)
def test_devices_that_one_process_cannot_lead_are_rejected(pools: dict, where: dict, facts: list) -> None:
    roles = {"actor": "main", "rollout": RolePlacement.model_validate(where)}
    with rejects("placement.roles.rollout", *facts, error=PlacementError):
        plan(Placement(pools=pools, roles=roles), gpus(3, 3), dedicated=["rollout"])


def test_several_devices_per_node_of_a_replica_are_rejected_on_cpus() -> None:
    roles = {"rollout": RolePlacement(pool="makers", tp=2, pp=2)}
    with rejects("placement.roles.rollout", 2, "nodes", "pp", error=PlacementError):
        plan(Placement(pools={"makers": [2, 2]}, roles=roles), Inventory((2, 2), "cpu"), dedicated=["rollout"])


def test_tensor_parallel_ranks_of_a_model_are_on_one_node() -> None:
    """Each layer sums over these ranks. 4 ranks fit on each of two nodes with 4 GPUs."""
    for per_node, tp, fix in (([4, 4], 8, 4), ([3, 3], 2, "remove"), ([6, 2], 4, 2)):
        roles = {"actor": RolePlacement(pool="main", tp=tp)}
        with rejects("placement.roles.actor", tp, "nodes", fix, error=PlacementError):
            plan(Placement(pools={"main": per_node}, roles=roles), gpus(*per_node))


def test_a_leader_of_shared_and_other_devices_is_rejected() -> None:
    roles = {"actor": "main[1:2]", "rollout": RolePlacement(pool="main", tp=2)}
    with rejects("placement.roles.rollout", "tp", 2, error=PlacementError):
        plan(Placement(pools={"main": [2]}, roles=roles), gpus(2), dedicated=["rollout"])


def test_a_leader_of_shared_devices_holds_the_part_of_one_device_that_is_free_on_all() -> None:
    roles = {"actor": "main", "judge": "main[3:4]", "rollout": RolePlacement(pool="main", tp=2)}
    planned = plan(Placement(pools={"main": [4]}, roles=roles), gpus(4), dedicated=["rollout", "judge"])
    rollout = planned.roles["rollout"]
    assert rollout.replica.tp == 2
    assert [(slot.node_devices, slot.num_devices) for slot in rollout.slots] == [
        (((0, 0), (0, 1)), 1 / 2),
        (((0, 2), (0, 3)), 1 / 3),
    ]


def test_devices_of_a_dedicated_role_have_no_other_process() -> None:
    roles = {"actor": "main[0:2]", "rollout": "main[1:3]", "reward": "makers"}
    planned = plan(Placement(pools={"main": [3], "makers": [1]}, roles=roles), gpus(4), dedicated=["rollout", "reward"])
    groups = planned.failure_groups()
    running = {group.name: [(slot.device, slot.num_devices) for slot in group.slots] for group in groups}
    assert running == {
        "main": [(0, 1), (1, 0.5)],
        "main[1:3]/rollout": [(1, 0.5), (2, 1)],
        "makers/reward": [(3, 1)],
    }


@pytest.mark.parametrize(
    ("requested", "usable_cpus", "is_inline", "shown"),
    [
        (3, 64, False, "3"),
        (None, 64, False, "5 (usable CPUs: 64, processes: 12)"),
        (None, 8, False, "1 (usable CPUs: 8, processes: 12)"),
        (None, 8, True, "8 (usable CPUs: 8, processes: 1)"),
        (None, None, False, "OMP_NUM_THREADS, or else usable CPUs of the node / 12, at least 1"),
    ],
)
def test_a_plan_shows_the_threads_of_a_process(
    requested: int | None, usable_cpus: int | None, is_inline: bool, shown: str
) -> None:
    """8 processes of the actor, and 4 of the rollout on the first half of the same devices."""
    placement = Placement(pools={"main": [8]}, roles={"actor": "main", "rollout": "main[0:4]"})
    planned = plan(placement, gpus(8), dedicated=("rollout",))
    line = render_threads(planned, requested, usable_cpus, is_inline=is_inline)
    assert line == f"torch CPU threads per process: {shown}"


def test_the_processes_of_every_node_are_counted() -> None:
    planned = plan(Placement(pools={"main": [2, 1]}, roles={"actor": "main"}), gpus(2, 1))
    assert planned.count_processes() == {0: 2, 1: 1}
    assert "/ 1 or 2," in render_threads(planned, None, None)
