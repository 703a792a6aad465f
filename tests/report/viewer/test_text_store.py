"""The store reads the shards of a run that may be active."""

from pathlib import Path

import pytest

from flowrl.config import RolloutLogConfig
from flowrl.report.rollout_log import RolloutLog
from flowrl.report.viewer.text_store import Shard, TextStore
from tests.errors import rejects
from tests.report.viewer.saved_rows import make_row


@pytest.fixture
def log(tmp_path: Path) -> RolloutLog:
    log = RolloutLog(tmp_path / "rollouts", RolloutLogConfig(every=1))
    log.write("training", 1, [make_row(0, prompt_id=7), make_row(1, prompt_id=70)])
    log.write("evaluation", 0, [make_row(0, prompt_id=7, set="hard"), make_row(1, prompt_id=7, set="easy")])
    return log


def test_shards_are_in_the_order_of_steps(tmp_path: Path, log: RolloutLog) -> None:
    log.write("evaluation", 1, [make_row()])
    assert TextStore(tmp_path).shards() == [Shard(0, "evaluation"), Shard(1, "training"), Shard(1, "evaluation")]


def test_a_shard_that_a_resumed_run_writes_again_is_read_again(tmp_path: Path, log: RolloutLog) -> None:
    store, shard = TextStore(tmp_path), Shard(1, "training")
    first = store.load(shard)
    assert store.load(shard) is first
    changed_ns = store.changed_ns(shard)
    while store.changed_ns(shard) == changed_ns:  # the clock of the file system may be coarse
        log.write("training", 1, [make_row(response="new")])
    assert [row["response"] for row in store.load(shard)] == ["new"]


def test_a_shard_that_was_removed_is_an_error(tmp_path: Path, log: RolloutLog) -> None:
    store = TextStore(tmp_path)
    assert store.changed_ns(Shard(4, "training")) == 0
    with rejects(4):
        store.load(Shard(4, "training"))


def test_rows_of_one_prompt_in_all_steps(tmp_path: Path, log: RolloutLog) -> None:
    log.write("training", 2, [make_row(4, prompt_id=7), make_row(5, prompt_id=17)])
    log.write("evaluation", 2, [make_row(0, prompt_id=7, set="hard")])
    store = TextStore(tmp_path)

    def found(shard: Shard, index: int) -> list[tuple[int, int]]:
        return [(row["step"], row["row"]) for row in store.rows_of_prompt(store.load(shard)[index])]

    assert found(Shard(1, "training"), 0) == [(1, 0), (2, 4)]
    assert found(Shard(1, "training"), 1) == [(1, 1)]
    assert found(Shard(0, "evaluation"), 0) == [(0, 0), (2, 0)]
    assert found(Shard(0, "evaluation"), 1) == [(0, 1)]
    assert list(store.rows_of_prompt(make_row(prompt_id=None))) == []
