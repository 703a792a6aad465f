import inspect
import os

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flowrl import Batch, ContractError, make_tensordict
from flowrl.data.batch.payload import ColumnError
from tests.controller.conftest import Shared
from tests.controller.workers import Arithmetic
from tests.errors import rejects


def test_a_method_shows_the_workers_signature_and_docstring(shared: Shared):
    expected = inspect.signature(Arithmetic.identify)
    parameters = list(expected.parameters.values())[1:]
    assert inspect.signature(shared.first.identify) == expected.replace(parameters=parameters)
    assert shared.first.identify.__doc__ == "Rank, world size and a scaled number."


def test_wrong_arguments_fail_in_the_driver(shared: Shared):
    with pytest.raises(ContractError, match=r"first\.identify\(x: int = 1.*'y'"):
        shared.first.identify(y=1)


def test_the_error_of_an_unregistered_method_names_the_decorator(shared: Shared):
    with pytest.raises(AttributeError, match=r"Arithmetic\.peer.*@register"):
        shared.first.peer("guest")


def test_a_method_that_does_not_exist_names_role_and_class(shared: Shared):
    with pytest.raises(AttributeError, match=r"'first'.*Arithmetic.*'nothing'"):
        shared.first.nothing()


def test_arguments_are_given_by_position_or_by_name(shared: Shared, batch: Batch):
    by_name = shared.first.scaled(shift=3, table=batch)
    assert by_name.get("y").tolist() == shared.first.scaled(batch, 3).get("y").tolist() == [3 + 2 * x for x in range(7)]


def test_a_method_may_take_any_other_names(shared: Shared):
    assert shared.second.options(1, role="a", others=2) == [{"x": 1, "role": "a", "others": 2}] * 2


def test_submit_does_not_wait_and_a_blocking_call_does(shared: Shared):
    future = shared.first.identify.submit(2)
    assert future.get() == shared.first.identify(2)


def test_a_missing_column_is_named_before_anything_is_sent(shared: Shared, batch: Batch):
    sent = len(shared.cluster.calls.in_flight())
    with pytest.raises(ContractError, match=r"first\.scaled.*'x'.*text, ids"):
        shared.first.scaled(batch.drop("x"))
    assert len(shared.cluster.calls.in_flight()) <= sent


def test_a_batch_inside_a_list_is_rejected_with_role_and_method(shared: Shared, batch: Batch):
    with rejects("first.identify", error=ContractError):
        shared.first.identify([batch])


def test_only_the_columns_that_are_read_arrive(shared: Shared, batch: Batch):
    with_others = batch.union(Batch.from_columns({"maybe": [0] * 7, "scores": [0.0] * 7}))
    assert shared.first.received_columns(batch.drop("ids")) == ["text", "x"]
    assert shared.first.received_columns(with_others) == ["ids", "length", "maybe", "text", "x"]


def test_each_parameter_has_its_own_columns(shared: Shared):
    columns = Batch.from_columns({"x": [1], "y": [2], "z": [3]})
    assert shared.first.columns_of_two(columns, columns) == (["x"], ["z"])


@pytest.mark.parametrize("made_by", ["driver", "worker"])
def test_the_bytes_of_other_columns_are_not_sent(shared: Shared, made_by: str):
    """A thousand numbers are read of a batch of four million."""
    big = Batch.from_columns({"x": np.arange(1000), "y": np.zeros((1000, 1000), dtype=np.float32)})
    batch = big if made_by == "driver" else shared.first.echo(big)
    assert shared.second.received_bytes(batch) <= 8000 + 64


def test_a_result_without_declared_columns_has_them_when_resolved(shared: Shared, batch: Batch):
    result = shared.first.echo(batch)
    assert result.columns == ("x", "text", "ids")
    assert result.get("text") == batch.get("text") and torch.equal(result.get("ids"), batch.get("ids"))


def test_a_method_may_return_a_stated_multiple_of_its_rows(shared: Shared, batch: Batch):
    doubled = shared.first.twice(batch)
    assert len(doubled) == 14 and doubled.get("copy").tolist() == [x for x in range(7) for _ in range(2)]


def test_the_rows_of_a_filter_are_known_when_it_is_done(shared: Shared, batch: Batch):
    filtered = shared.first.keep_even(batch)
    assert "? rows" in repr(filtered)
    assert len(filtered) == 4 and filtered.get("x").tolist() == [0, 2, 4, 6]
    assert filtered.lengths().tolist() == [1, 3, 5, 7]


def test_filtered_rows_are_sent_to_another_group(shared: Shared, batch: Batch):
    assert shared.second.scaled(shared.first.keep_even(batch)).get("y").tolist() == [0, 10, 20, 30]


def test_a_chain_of_calls_needs_no_get(shared: Shared, batch: Batch):
    once = shared.first.scaled(batch).rename({"y": "x"})
    doubled = shared.second.scaled(once, shift=1).rename({"y": "x"})
    assert shared.first.scaled(doubled).get("y").tolist() == [2 * (5 * 2 * x + 1) for x in range(7)]


def test_one_batch_is_used_by_two_groups(shared: Shared, batch: Batch):
    batch["a"], batch["b"] = shared.first.scaled(batch), shared.second.scaled(batch)
    assert (batch.get("a") + batch.get("b")).tolist() == [7 * x for x in range(7)]


def test_columns_of_several_groups_meet_in_one_call(shared: Shared, batch: Batch):
    joined = batch.union(shared.second.scaled(batch)).union(shared.first.next_tokens(batch)).rows([5, 0, 5]).repeat(2)
    result = shared.second.echo(joined)
    assert result.get("y").tolist() == [25, 25, 0, 0, 25, 25]
    assert result.get("next").tolist() == [token + 1 for token in result.get("ids").tolist()]


def test_minibatches_of_results_contain_the_right_rows(shared: Shared, batch: Batch):
    both = batch.union(shared.first.scaled(batch))
    for part in both.minibatches(3, seed=1):
        assert shared.second.echo(part).get("y").tolist() == [2 * x for x in part.get("x").tolist()]


def test_batches_of_the_driver_are_joined_and_sent(shared: Shared):
    joined = Batch.concat([Batch.from_columns({"x": [1, 2]}), Batch.from_columns({"x": [3]})])
    assert shared.first.scaled(joined).get("y").tolist() == [2, 4, 6]


def test_batches_of_driver_and_workers_are_joined_and_sent(shared: Shared, batch: Batch):
    joined = Batch.concat([shared.second.echo(batch.select("x")), batch.select("x").rows([1])])
    assert shared.first.scaled(joined).get("y").tolist() == [*(2 * x for x in range(7)), 2]


def test_large_rows_of_the_driver_are_sent(shared: Shared):
    x = np.arange(100_000)
    assert np.array_equal(shared.first.scaled(Batch.from_columns({"x": x})).get("y").numpy(), 2 * x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.float64])
def test_dtypes_are_preserved(shared: Shared, dtype: torch.dtype):
    values = torch.tensor([0, 1, 1], dtype=torch.float64)
    sent = Batch.from_columns({"x": values}).apply(cast, ("x",), ("z",), dtype=str(dtype).removeprefix("torch."))
    result = shared.second.echo(shared.first.echo(sent.select("z")))
    assert result.get("z").dtype == dtype and result.get("z").double().tolist() == [0, 1, 1]


def cast(table, dtype: str):
    return make_tensordict({"z": table["rows", "x"].to(getattr(torch, dtype))})


def test_a_result_does_not_alias_worker_memory(shared: Shared, batch: Batch):
    result = shared.first.remember(batch)
    shared.first.overwrite()
    assert result.get("buffer").tolist() == list(range(7))
    assert result.get("names") == [[x] for x in range(7)]


def test_token_columns_of_different_lengths_are_rejected_when_read(shared: Shared, batch: Batch):
    other = Batch.from_columns(tokens={"z": list(range(28))}, lengths=[7, 6, 5, 4, 3, 2, 1])
    with pytest.raises(ColumnError, match=r"\bids\b.* \bz\b"):
        batch.union(shared.first.echo(other)).tensordict("ids", "z")


def test_roles_of_one_pool_share_processes(shared: Shared):
    assert shared.first.process_id() == shared.guest.process_id()
    assert shared.first.is_colocated_in(shared.guest)
    assert not shared.first.is_colocated_in(shared.second)


def test_ranks_of_the_ray_backend_are_processes(shared: Shared):
    own = set(shared.first.process_id() + shared.second.process_id())
    assert own == {os.getpid()} if shared.backend != "ray" else len(own) == 5 and os.getpid() not in own


def test_a_worker_reads_its_peer_in_the_same_process(shared: Shared):
    assert shared.first.peer_factor("guest") == [7, 7, 7]
    assert shared.first.peer_factor("second") == [None, None, None]


def test_run_calls_a_function_with_every_worker(shared: Shared):
    def described(worker: Arithmetic, x: int, *, fn: str = "", **others: int) -> tuple:
        return worker.rank, worker.factor, x, fn, others

    assert shared.second.run(described, 4, fn="a", b=1) == [(rank, 5, 4, "a", {"b": 1}) for rank in (0, 1)]
    assert shared.second.run(described, x=4, rank_zero=True) == (0, 5, 4, "", {})


def test_run_accepts_batches_and_futures(shared: Shared, batch: Batch):
    def total(worker: Arithmetic, table: TensorDict, extra: int) -> int:
        return int(table["rows", "x"].sum()) + extra + worker.rank

    assert shared.second.run(total, batch.select("x"), shared.first.double(10)) == [41, 42]


def test_run_can_change_a_worker(shared: Shared):
    def remember(worker: Arithmetic) -> None:
        worker.names = [[worker.rank]]

    shared.second.run(remember)
    assert shared.second.run(lambda worker: worker.names) == [[[0]], [[1]]]


def test_run_rejects_arguments_that_do_not_fit_the_function(shared: Shared):
    with pytest.raises(ContractError, match=r"second\.run"):
        shared.second.run(lambda worker: None, 1)
    with pytest.raises(ContractError, match=r"second\.run"):
        shared.second.run(lambda worker, *args: None, 1)
