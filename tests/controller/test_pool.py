import pytest

from flowrl import ResourcePool
from flowrl.controller.placement.plan import PlacementError


def test_a_pool_counts_its_devices():
    assert ResourcePool((8, 8)).world_size == 16


def test_a_pool_splits_on_every_node():
    assert ResourcePool((8, 4)).split(2) == [ResourcePool((4, 2))] * 2


def test_an_odd_split_is_refused():
    with pytest.raises(PlacementError, match="a node of 3 devices does not split into 2 equal pools"):
        ResourcePool((4, 3)).split(2)


def test_merging_undoes_a_split():
    assert ResourcePool.merge(ResourcePool((8, 4)).split(4)) == ResourcePool((8, 4))


def test_pools_of_different_nodes_do_not_merge():
    with pytest.raises(PlacementError, match="pools of different numbers of nodes do not merge"):
        ResourcePool.merge([ResourcePool((2,)), ResourcePool((2, 2))])


@pytest.mark.parametrize("counts", [(), (0,), (2, -1)])
def test_an_empty_pool_is_refused(counts: tuple[int, ...]):
    with pytest.raises(PlacementError, match="at least one device on each of its nodes"):
        ResourcePool(counts)
