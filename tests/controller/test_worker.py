from typing import Any

import pytest

from flowrl.controller.worker import Contract, Dispatch, Rows, Worker, get_contract, get_registered_methods, register
from tests.controller.dispatch_modes import EVERY_SECOND
from tests.errors import rejects


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def inherited(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def replaced(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def withdrawn(self) -> None: ...


class Derived(Base):
    @register(Dispatch.RANK_ZERO, blocking=False, reads=("x",), writes=("y",), rows=2)
    def replaced(self) -> None: ...

    def withdrawn(self) -> None: ...


def test_a_registered_method_is_still_a_plain_function():
    assert Base().inherited() is None and get_contract(Base.inherited) == Contract(Dispatch.ONE_TO_ALL)


def test_a_subclass_inherits_replaces_and_withdraws_methods():
    methods = get_registered_methods(Derived)
    assert set(methods) == {"inherited", "replaced"}
    assert methods["replaced"][1] == Contract(Dispatch.RANK_ZERO, False, ("x",), ("y",), 2)


def test_an_undecorated_method_has_no_contract():
    assert get_contract(Derived.withdrawn) is None


@pytest.mark.parametrize("mode", [None, "nowhere", "ONE_TO_ALL", Dispatch, len])
def test_an_unknown_dispatch_mode_is_rejected(mode: Any):
    with rejects("Dispatch.ONE_TO_ALL", "Dispatch.ALL_TO_ONE", "register_dispatch_mode", error=ValueError):
        register(mode)


def test_a_custom_dispatch_mode_is_named_in_the_contract():
    @register(EVERY_SECOND, blocking=False)
    def method() -> None: ...

    assert get_contract(method) == Contract("every_second", blocking=False)


def test_columns_may_be_declared_per_parameter():
    contract = Contract(Dispatch.RANK_ZERO, reads={"left": ("x",)})
    assert (contract.get_reads("left"), contract.get_reads("right")) == (("x",), ())


def test_a_method_that_declares_nothing_reads_everything():
    assert Contract(Dispatch.RANK_ZERO).get_reads("batch") is None


def test_balance_requires_as_many_rows_out_as_in():
    with pytest.raises(ValueError, match=r"balance=.*rows=2"):
        register(Dispatch.DP_COMPUTE_PROTO, rows=2, balance="tokens")


def test_parameters_without_names_are_rejected():
    with pytest.raises(ValueError, match=r"\*values"):

        @register(Dispatch.ONE_TO_ALL)
        def method(self: Worker, *values: int) -> None: ...


@pytest.mark.parametrize(("mode", "rows"), [(Dispatch.DP_COMPUTE_PROTO, "same"), (Dispatch.COLLECT, "unknown")])
def test_a_batch_without_columns_cannot_be_declared(mode: str, rows: Rows):
    with pytest.raises(ValueError, match=r"writes=\(\)"):
        register(mode, writes=(), rows=rows)


@pytest.mark.parametrize("rows", ["same", 2])
def test_collect_requires_unknown_rows(rows: Rows):
    with pytest.raises(ValueError, match=f"rows={rows!r}"):
        register(Dispatch.COLLECT, rows=rows)


def test_replay_requires_resend():
    with pytest.raises(ValueError, match=r"replay.*resend=False"):
        register(Dispatch.ONE_TO_ALL, replay=True, resend=False)


class Configured(Worker):
    def __init__(self, config: str, size: int = 1) -> None:
        self.config, self.size = config, size


class Extended(Configured):
    """A subclass that passes its arguments on, as in tests/recipes/witnesses.py."""

    def __init__(self, *args: Any, extra: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("cls", "args", "kwargs", "expected"),
    [
        (Configured, ("own",), {}, "own"),
        (Configured, (), {"size": 2, "config": "own"}, "own"),
        (Extended, ("own",), {"extra": 1}, "own"),
        (Extended, (), {"extra": 1, "config": "own"}, "own"),
        (Base, (), {}, None),
    ],
)
def test_the_settings_of_calls_are_the_first_argument_of_the_constructor(
    cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any], expected: str | None
) -> None:
    assert cls.call_settings(*args, **kwargs) == expected
