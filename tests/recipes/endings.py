"""Programs that tests interrupt: a recipe whose workers sleep, and a driver without a recipe."""

import itertools
import sys
import time
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from flowrl import Batch, Cluster, Dispatch, Placement, Worker, register
from flowrl.cli import run_recipe
from flowrl.config import ExportConfig, RoleConfig, RunConfig
from flowrl.data.batch.tensordicts import num_rows
from flowrl.data.metric import Metric, Sum


class Slow(Worker):
    """An actor that sleeps."""

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("x",))
    def update(self, table: TensorDict) -> dict[str, Metric]:
        time.sleep(0.3)
        return {"rows": Sum(num_rows(table))}

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path, config: ExportConfig) -> None:
        folder.mkdir()
        time.sleep(0.3)
        (folder / "weights").write_text("complete")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SlowConfig(RunConfig):
    """A hundred steps of sleeping, on two ranks."""

    actor: RoleConfig = RoleConfig()


def train(config: SlowConfig) -> dict[str, Any]:
    from flowrl.run.loop import Run  # noqa: PLC0415 (loads torch and matplotlib, which the driver below does without)

    with Run(config) as run:
        actor = run.group("actor", Slow)
        rows = Batch.from_rows([{"x": number} for number in range(4)])
        for batch in run.batches(itertools.repeat(rows), policy=actor):
            run.log(actor.update(batch))
        run.save_model(actor)
        return run.finish()


def drive(address: str, seconds: float) -> None:
    """Holds two CPU slots of the cluster at `address` while both ranks sleep."""
    placement = Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})
    with Cluster(placement, address=address, num_threads=1) as cluster:
        actor = cluster.group("actor", Slow)
        actor.sleep(0.0).get()
        sleeping = actor.sleep(seconds)
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        sleeping.get()


def main(argv: list[str]) -> int:
    return run_recipe(SlowConfig, train, argv)
