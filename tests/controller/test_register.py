import pytest

from flowrl.controller.register import Contract, Dispatch, Rows, get_contract, get_registered_methods, register
from flowrl.controller.worker import Worker


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def kept(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def replaced(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def withdrawn(self) -> None: ...


class Derived(Base):
    @register(Dispatch.RANK_ZERO, blocking=False, reads=("x",), writes=("y",), rows=2)
    def replaced(self) -> None: ...

    def withdrawn(self) -> None: ...


def test_a_registered_method_is_still_a_plain_function():
    assert Base().kept() is None and get_contract(Base.kept) == Contract(Dispatch.ONE_TO_ALL)


def test_a_subclass_inherits_replaces_and_withdraws_methods():
    found = get_registered_methods(Derived)
    assert set(found) == {"kept", "replaced"}
    assert found["replaced"][1] == Contract(Dispatch.RANK_ZERO, False, ("x",), ("y",), 2)


def test_an_undecorated_method_has_no_contract():
    assert get_contract(Derived.withdrawn) is None


def test_columns_may_be_declared_per_parameter():
    contract = Contract(Dispatch.RANK_ZERO, reads={"left": ("x",)})
    assert (contract.get_reads("left"), contract.get_reads("right")) == (("x",), ())


def test_a_method_that_declares_nothing_reads_everything():
    assert Contract(Dispatch.RANK_ZERO).get_reads("batch") is None


def test_balancing_needs_as_many_rows_out_as_in():
    with pytest.raises(ValueError, match="balance='tokens' restores the order of rows, which needs rows='same', not 2"):
        register(Dispatch.DP_COMPUTE_PROTO, rows=2, balance="tokens")


def test_arguments_without_names_are_refused_where_the_method_is_written():
    with pytest.raises(ValueError, match=r"method takes \*values; arguments travel by name"):

        @register(Dispatch.ONE_TO_ALL)
        def method(self: Worker, *values: int) -> None: ...


@pytest.mark.parametrize(("mode", "rows"), [(Dispatch.DP_COMPUTE_PROTO, "same"), (Dispatch.COLLECT, "unknown")])
def test_a_batch_of_no_columns_is_not_promised(mode: str, rows: Rows):
    with pytest.raises(ValueError, match=r"writes=\(\) promises a batch without columns"):
        register(mode, writes=(), rows=rows)


@pytest.mark.parametrize("rows", ["same", 2])
def test_rows_that_a_rank_has_of_its_own_are_not_counted_by_a_batch(rows: Rows):
    with pytest.raises(ValueError, match=rf"rows={rows!r} counts by the rows that come in, and with collect none do"):
        register(Dispatch.COLLECT, rows=rows)


def test_a_state_that_is_given_again_is_not_of_a_call_that_is_not_made_again():
    with pytest.raises(ValueError, match=r"replay has a call made again .* and resend=False does not: drop one"):
        register(Dispatch.ONE_TO_ALL, replay=True, resend=False)
