"""The order of the operations on the memory of a device that an actor and a dedicated rollout share.

The inline backend evicts them as if they were two processes.

An order of calls is no proof that work on the streams of a GPU ends in this order. Only a run on a GPU shows that.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrl import Batch, WorkerGroup
from flowrl.config import ActorConfig, EngineConfig, ModelConfig, OptimizerConfig, RolloutConfig, TransferConfig
from flowrl.controller.errors import WorkerError
from flowrl.devices import device as devices
from flowrl.weight_sync.transfer import CudaIpcTransfer, ObjectStoreTransfer, WeightTransfer
from tests.conftest import ClusterMaker
from tests.errors import rejects
from tests.workers.colocated import RecordedActor, RecordedRollout, SleepingEngine

EVICTED_ROLLOUT = ["rollout sleep", "release cached"]
EVICTED_ACTOR = ["actor offload", "release cached"]


@pytest.fixture(autouse=True)
def unrecorded() -> Iterator[None]:
    """Ends the recording after the test."""
    own = devices._CPU
    yield
    devices._CPU = own


class Colocated:
    """Real workers of an actor and a dedicated rollout on one device."""

    def __init__(self, open_cluster: ClusterMaker, model: ModelConfig, log: Path, offload: str = "none") -> None:
        roles = dict.fromkeys(("actor", "rollout"), "main")
        self.cluster = open_cluster("inline", {"main": [1]}, roles, dedicated=("rollout",), num_threads=1)
        engine = EngineConfig.model_validate({"offload": offload})
        config = ActorConfig(model=model, optimizer=OptimizerConfig(lr=0.01), temperature=1.0, engine=engine)
        self.actor: WorkerGroup = self.cluster.group("actor", RecordedActor, config, log)
        rollout_engine = f"{SleepingEngine.__module__}:{SleepingEngine.__name__}"
        rollout = RolloutConfig(engine=rollout_engine, max_response_tokens=4, options={"folder": str(log)})
        self.rollout: WorkerGroup = self.cluster.group("rollout", RecordedRollout, rollout, model, seed=0)
        self.cluster.wait_for_calls()
        self._log, self._num_start = log, len(log.read_text().splitlines())

    def generate(self) -> Batch:
        return self.rollout.generate(Batch.from_rows([{"prompt_ids": [2, 3], "prompt_id": 0, "sample": 0}]))

    def step(self, transfer: WeightTransfer, *, drops_weights: bool = False) -> list[str]:
        """Runs a training step with a weight sync. Returns the recorded operations."""
        self.generate()
        if drops_weights:
            self.rollout.expect_update()
        tokens = {"input_ids": [2, 3, 4], "response_mask": [False, True, True]}
        floats = {"old_logprobs": torch.full((3,), -1.0), "advantages": torch.ones(3)}
        self.actor.update(Batch.from_columns(tokens=tokens | floats, lengths=[3]))
        transfer.send(1)
        self.generate()
        self.cluster.wait_for_calls()
        return self._log.read_text().splitlines()[self._num_start :]


def test_cached_memory_is_released_before_the_other_role_wakes_up(
    open_cluster: ClusterMaker, model: ModelConfig, tmp_path: Path
) -> None:
    run = Colocated(open_cluster, model, tmp_path / "log")
    config = TransferConfig(bucket_mb=0.3)
    num_buckets = run.actor.num_buckets(config.bucket_mb).get()
    assert num_buckets > 1
    assert run.step(ObjectStoreTransfer(run.actor, run.rollout, config)) == [
        *("rollout generate", *EVICTED_ROLLOUT, "actor update", *EVICTED_ACTOR),
        *("rollout wake weights", *["rollout receive"] * num_buckets),
        *("rollout wake kv_cache", "rollout generate"),
    ]


def test_an_ipc_buffer_is_complete_before_it_is_read_and_released_before_the_kv_cache_wakes_up(
    open_cluster: ClusterMaker, model: ModelConfig, tmp_path: Path
) -> None:
    run = Colocated(open_cluster, model, tmp_path / "log")
    config = TransferConfig(bucket_mb=0.3)
    num_buckets = run.actor.num_buckets(config.bucket_mb).get()
    assert num_buckets > 1
    share, read = "wait for stream", ["rollout receive", "wait for stream"]
    assert run.step(CudaIpcTransfer(run.actor, run.rollout, config)) == [
        *("rollout generate", *EVICTED_ROLLOUT, "actor update"),
        *("actor offload", "release cached", share, "rollout wake weights", *read),
        *["release ipc", share, *read] * (num_buckets - 1),
        *("release ipc", "release cached"),
        *(*EVICTED_ACTOR, "rollout wake kv_cache", "rollout generate"),
    ]


def test_only_the_weights_of_an_actor_that_offloads_stay_beside_those_of_the_rollout(
    open_cluster: ClusterMaker, model: ModelConfig, tmp_path: Path
) -> None:
    run = Colocated(open_cluster, model, tmp_path / "log", offload="idle")
    config = TransferConfig(bucket_mb=0.3)
    num_buckets = run.actor.num_buckets(config.bucket_mb).get()
    share, read = "wait for stream", ["rollout receive", "wait for stream"]
    moments, weights = ["host buffer", "copy to host", "copied"], ["copy to host"]
    assert run.step(CudaIpcTransfer(run.actor, run.rollout, config)) == [
        *("rollout generate", *EVICTED_ROLLOUT, "actor update"),
        *("actor offload", *moments, *weights, "release cached", share, "rollout wake weights", *read),
        *["release ipc", share, *read] * (num_buckets - 1),
        *("release ipc", "release cached"),
        # The weights were copied while the rollout loaded them. Only small ones, such as norms, are copied again.
        *(
            "actor offload",
            "copied",
            "copy to host",
            "copied",
            "release cached",
            "rollout wake kv_cache",
            "rollout generate",
        ),
    ]


def test_a_rollout_that_expects_an_update_drops_its_weights_once(
    open_cluster: ClusterMaker, model: ModelConfig, tmp_path: Path
) -> None:
    run = Colocated(open_cluster, model, tmp_path / "log")
    transfer = ObjectStoreTransfer(run.actor, run.rollout, TransferConfig(bucket_mb=0.3))
    first = run.step(transfer, drops_weights=True)
    assert [line for line in first if "sleep" in line] == ["rollout sleep without weights"]
    assert first[-1] == "rollout generate"
    second = run.step(transfer)[len(first) :]
    assert [line for line in second if "sleep" in line] == ["rollout sleep"]


def test_a_rollout_without_weights_does_not_generate(
    open_cluster: ClusterMaker, model: ModelConfig, tmp_path: Path
) -> None:
    run = Colocated(open_cluster, model, tmp_path / "log")
    run.generate()
    run.rollout.expect_update()
    run.actor.num_buckets(0.3)
    run.actor.weights(0, 0.3).get()  # evicts the rollout
    with rejects("broken", "generate", error=WorkerError):
        run.generate().get("weight_version")
