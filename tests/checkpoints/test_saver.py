"""`Saver` and a run with checkpoints, with user-defined workers that count updates."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from flowrl import Batch, Dispatch, Placement, Worker, register
from flowrl.checkpoints.checkpoints import Checkpoints, manifest_crc32
from flowrl.checkpoints.resume import RunComplete
from flowrl.config import ExportConfig, RoleConfig, RunConfig, UserError
from flowrl.controller.errors import WorkerError
from flowrl.data.checksums import CheckpointError
from flowrl.data.metric import Mean, Metric
from flowrl.run.loop import Run


class Counter(Worker):
    """Counts updates, and implements the two methods of checkpoints."""

    def __init__(self, slow_s: float = 0.0, fails: bool = False) -> None:
        self.count, self.slow_s, self.fails = 0, slow_s, fails

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("x",))
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        self.count += 1
        return {"loss": Mean(float(abs(3 - self.count)), 1), "x": Mean(float(batch["rows", "x"].sum()), 1)}

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        if self.fails:
            raise UserError("the count cannot be written")
        time.sleep(self.slow_s)
        (folder / f"count-{self.rank}").write_text(str(self.count))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: Path) -> None:
        self.count = int((folder / "count-0").read_text())

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path, config: ExportConfig) -> None:
        folder.mkdir()
        (folder / "count").write_text(str(self.count))


class Forgetful(Worker):
    """A worker without the methods of checkpoints."""


class Steps:
    """A driver object with state."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def restore(self, state: Any) -> None:
        self.seen = state["seen"]


class Other(Steps):
    """Another driver object."""


class CountConfig(RunConfig):
    actor: RoleConfig = RoleConfig()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., CountConfig]:
    def make(**changes: Any) -> CountConfig:
        settings: dict[str, Any] = {
            "output": tmp_path / "out",
            "backend": "inline",
            "placement": Placement(device="cpu", pools={"main": [1]}, roles={"actor": "main"}),
            "steps": 7,
            "checkpoint": {"every": 2, "keep_last": None},
            "resume": "auto",
        }
        return CountConfig.model_validate(settings | changes)

    return make


def train(config: CountConfig, *arguments: Any) -> Steps:
    steps = Steps()
    rows = Batch.from_rows([{"x": number} for number in range(14)])
    with Run(config) as run:
        actor = run.group("actor", Counter, *arguments)
        run.add_checkpointable(actor, steps)
        for batch in run.batches(rows.minibatches(2), policy=actor):
            steps.seen.append(run.step)
            run.log(actor.update(batch))
        run.save_model(actor)
        run.finish()
    return steps


def draw(config: CountConfig) -> list[int]:
    """Trains like `train`, and returns a random number of the driver per step."""
    drawn = Steps()
    rows = Batch.from_rows([{"x": number} for number in range(14)])
    with Run(config) as run:
        actor = run.group("actor", Counter)
        run.add_checkpointable(actor, drawn)
        for batch in run.batches(rows.minibatches(2), policy=actor):
            drawn.seen.append(random.randrange(1000))
            run.log(actor.update(batch))
        run.finish()
    return drawn.seen


def lines(config: CountConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_custom_workers_and_driver_state_are_restored(
    config: Callable[..., CountConfig], tmp_path: Path, asynchronous: bool
) -> None:
    straight = config(output=tmp_path / "straight")
    train(straight)
    checkpoint = {"every": 2, "keep_last": None, "asynchronous": asynchronous}
    train(config(steps=5, checkpoint=checkpoint))
    assert Checkpoints(config().output).steps() == [2, 4, 5]
    assert train(config(checkpoint=checkpoint)).seen == [1, 2, 3, 4, 5, 6, 7]
    assert (config().output / "model" / "count").read_text() == "7"
    assert [line["x"] for line in lines(config())] == [line["x"] for line in lines(straight)]


def test_random_numbers_of_the_driver_continue(config: Callable[..., CountConfig], tmp_path: Path) -> None:
    random.seed(0)
    straight = draw(config(output=tmp_path / "straight", steps=4))
    random.seed(0)
    draw(config(steps=2))
    random.seed(1)
    assert draw(config(steps=4)) == straight


def test_two_ray_ranks_save_and_resume(config: Callable[..., CountConfig], ray_session: None) -> None:
    two = Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})
    settings = config(steps=4, backend="ray", placement=two, threads=1)
    train(settings, 0.2)
    newest = Checkpoints(settings.output).newest()
    assert newest is not None and newest.manifest.roles["actor"].world_size == 2
    assert {"actor/count-0", "actor/count-1", "driver.json"} == newest.manifest.files.keys()
    train(config(), 0.0)
    assert (config().output / "model" / "count").read_text() == "7"


def test_a_run_without_rollouts_resumes_from_a_format_without_rows(config: Callable[..., CountConfig]) -> None:
    train(config(steps=2))
    manifest = config().output / "checkpoints" / "step-000002" / "manifest.json"
    values = json.loads(manifest.read_text()) | {"format": 1}
    manifest.write_text(json.dumps(values | {"crc32": manifest_crc32(values)}))
    assert train(config()).seen == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_that_lost_its_results_writes_them_again_without_a_step(config: Callable[..., CountConfig]) -> None:
    train(config())
    before = lines(config())
    (config().output / "summary.json").unlink()
    assert train(config()).seen == [1, 2, 3, 4, 5, 6, 7]
    assert lines(config()) == before
    assert (config().output / "model" / "count").read_text() == "7"


def test_a_complete_run_starts_no_worker_and_changes_no_file(config: Callable[..., CountConfig]) -> None:
    train(config())
    before = modified(config().output)
    with pytest.raises(RunComplete):
        train(config(steps=7, backend="ray", evaluate_every=3))
    assert modified(config().output) == before


def modified(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_newest_and_the_best_are_kept(config: Callable[..., CountConfig]) -> None:
    """The loss is least at step 3."""
    settings = config(checkpoint={"every": 1, "keep_last": 1, "keep_best": 1})
    train(settings)
    assert Checkpoints(settings.output).steps() == [3, 7]


def test_a_group_without_the_methods_is_rejected_by_name(config: Callable[..., CountConfig]) -> None:
    with (
        pytest.raises(UserError, match=r"role actor .*Forgetful .*load_checkpoint and save_checkpoint"),
        Run(config()) as run,
    ):
        run.add_checkpointable(run.group("actor", Forgetful))


def test_a_recipe_that_adds_nothing_to_checkpoints_is_rejected(config: Callable[..., CountConfig]) -> None:
    with pytest.raises(UserError, match=r"run\.add_checkpointable"), Run(config()) as run:
        next(run.batches([], policy=run.group("actor", Counter)), None)


def test_a_group_that_cannot_save_ends_the_run_and_leaves_the_checkpoints_before(
    config: Callable[..., CountConfig],
) -> None:
    train(config(steps=2))
    with pytest.raises(WorkerError, match=r"^actor\b.* count\b"):
        train(config(), 0.0, True)
    assert Checkpoints(config().output).steps() == [2]
    assert [path.name for path in (config().output / "checkpoints").iterdir()] == ["step-000002"]


def test_a_checkpoint_that_lacks_an_object_is_rejected(config: Callable[..., CountConfig]) -> None:
    train(config(steps=2))
    with pytest.raises(UserError, match=r"\bother\b"), Run(config()) as run:
        actor = run.group("actor", Counter)
        run.add_checkpointable(actor, Other())
        next(run.batches([], policy=actor), None)


def test_a_corrupt_checkpoint_is_rejected_before_the_start(config: Callable[..., CountConfig]) -> None:
    train(config(steps=4))
    (config().output / "checkpoints" / "step-000004" / "actor" / "count-0").write_text("40")
    with pytest.raises(CheckpointError, match=r"count-0 .*step 2"):
        train(config())
    assert Checkpoints(config().output).steps() == [2, 4] and len(lines(config())) == 4


def test_a_run_that_cannot_resume_keeps_its_checkpoints(config: Callable[..., CountConfig]) -> None:
    train(config(steps=2))
    (config().output / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"run\.add_checkpointable"), Run(config()) as run:
        next(run.batches([], policy=run.group("actor", Counter)), None)
    assert Checkpoints(config().output).steps() == [2]
