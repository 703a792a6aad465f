import os

import torch
from tensordict import TensorDict

from flowrl import Batch, Future
from flowrl.data.batch.tensordicts import lengths, make_tensordict, num_rows
from tests.controller.conftest import Shared
from tests.engines.tables import take_rows


def centred(table: TensorDict, scale: int = 1) -> TensorDict:
    """Centers a column over the full batch."""
    y = table["rows", "y"].double()
    return make_tensordict({"centred": (y - y.mean()) * scale}, {"more": table["tokens", "ids"] + 1}, lengths(table))


def large(table: TensorDict, least: int) -> TensorDict:
    return take_rows(table, torch.nonzero(table["rows", "y"] >= least).flatten())


def process_of(table: TensorDict) -> TensorDict:
    return make_tensordict({"process": torch.full((num_rows(table),), os.getpid())})


def total(table: TensorDict) -> int:
    return int(table["rows", "y"].sum())


def test_a_function_receives_the_full_batch_and_adds_its_columns(shared: Shared, batch: Batch):
    result = batch.union(shared.first.scaled(batch)).apply(centred, ("y", "ids"), ("centred", "more"), scale=2)
    assert result.columns == ("x", "text", "ids", "y", "centred", "more")
    assert result.get("centred").tolist() == [-12, -8, -4, 0, 4, 8, 12]
    assert shared.second.echo(result).get("more").tolist() == list(range(1, 29))


def test_a_function_on_the_task_worker_may_drop_rows(shared: Shared, batch: Batch):
    filtered = batch.union(shared.first.scaled(batch)).apply(large, ("y",), ("y",), rows="unknown", least=8)
    assert shared.second.echo(filtered).get("y").tolist() == [8, 10, 12]


def test_a_future_can_be_an_argument_of_a_function(shared: Shared, batch: Batch):
    filtered = shared.first.scaled(batch).apply(large, ("y",), ("y",), rows="unknown", least=shared.first.double(5))
    assert filtered.get("y").tolist() == [10, 12]


def test_reduce_gives_a_future(shared: Shared, batch: Batch):
    future = shared.first.scaled(batch).reduce(total, ("y",))
    assert isinstance(future, Future) and future.get() == 42


def test_functions_run_in_the_task_worker(shared: Shared, batch: Batch):
    processes = set(shared.first.scaled(batch).apply(process_of, ("y",), ("process",)).get("process").tolist())
    workers = set(shared.first.process_id() + shared.second.process_id())
    assert len(processes) == 1 and (shared.backend != "ray" or not processes & (workers | {os.getpid()}))
