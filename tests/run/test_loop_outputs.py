"""Files and messages of a run, and what is left of a run that fails."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict

from flowrl import Batch, Dispatch, Worker, WorkerError, make_tensordict, register
from flowrl.cli import exit_code
from flowrl.config import UserError
from flowrl.controller.errors import WorkerUserError
from flowrl.data.batch.tensordicts import num_rows
from flowrl.data.metric import Mean
from flowrl.report.rollout_log import read_rows
from flowrl.run.loop import Run
from tests.errors import missing_facts
from tests.full_disk import file_size_limit
from tests.report.trackers.test_trackers import read_wandb
from tests.run.echo_run import Counting, Echo, EchoConfig, lines, saved_scores, stream, train


def test_the_model_and_the_summary_are_written(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    train(settings)
    assert (settings.output / "model" / "weights").read_text() == "4"
    busy_fraction = json.loads((settings.output / "summary.json").read_text())["busy_fraction"]
    assert busy_fraction.keys() == {"node0/cpu:0", "node0/tasks"}


def test_tensorboard_events_and_generated_text_are_optional(config: Callable[..., EchoConfig]) -> None:
    quiet = config(report={"tensorboard": False, "rollouts": None})
    assert train(quiet)["accuracy_after"] == pytest.approx(0.4)
    names = {path.name for path in quiet.output.iterdir()}
    assert {"metrics.jsonl", "trace.json", "summary.json"} <= names
    assert not {"tensorboard", "rollouts"} & names


def test_generated_text_is_saved_by_default(config: Callable[..., EchoConfig]) -> None:
    settings = config(steps=5, evaluate_every=2)
    train(settings)
    assert saved_scores(settings, "training") == {1: [0.0] * 4, 5: [0.4] * 4}
    assert saved_scores(settings, "evaluation") == {0: [0.0] * 3, 2: [0.2] * 3, 4: [0.4] * 3, 5: [0.5] * 3}
    first, *_ = read_rows(settings.output / "rollouts", "training", 5)
    *_, prompt = stream(settings).take(first["prompt_id"] + 1)
    assert (first["prompt"], first["answer"]) == (prompt["prompt"], prompt["answer"])
    assert (first["step"], first["kind"], first["response"], first["row"]) == (5, "training", "sampled", 0)
    assert read_rows(settings.output / "rollouts", "evaluation", 5)[0]["response"] == "greedy"


def test_the_rows_and_steps_of_generated_text_are_settings(config: Callable[..., EchoConfig]) -> None:
    settings = config(report={"rollouts": {"every": 2, "rows": 3}})
    train(settings)
    assert saved_scores(settings, "training") == {1: [0.0] * 3, 2: [0.1] * 3, 4: [0.3] * 3}


def test_the_final_table_has_the_saved_responses(
    config: Callable[..., EchoConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config()
    train(settings)
    saved = read_rows(settings.output / "rollouts", "evaluation", 4)
    table = [line for line in capsys.readouterr().out.splitlines() if "greedy" in line]
    assert [line.split("│")[1].strip() for line in table] == [row["prompt"] for row in saved]
    assert [line.count("greedy") for line in table] == [2] * 3  # before and after training


@pytest.mark.slow
def test_a_run_sends_metrics_rows_and_results_to_its_trackers(
    config: Callable[..., EchoConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    settings = config(report={"trackers": [{"kind": "wandb", "mode": "offline"}]})
    train(settings)
    history, summary = read_wandb(settings.output)
    steps = [record["step"] for record in history if "elapsed_s" in record]
    assert steps == [line["step"] for line in lines(settings) if line["step"]]
    names = {name for record in history for name in record}
    assert names >= {"rollouts/training/nrows", "rollouts/evaluation/nrows", "accuracy"}
    assert summary["accuracy_after"] == pytest.approx(0.4)


def test_tensorboard_shows_a_few_rows(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    train(settings)
    events = EventAccumulator(str(settings.output / "tensorboard")).Reload()
    shown = {name: [event.step for event in events.Tensors(name)] for name in events.Tags()["tensors"]}
    assert shown == {"rollouts/training/text_summary": [1], "rollouts/evaluation/text_summary": [0, 4]}
    (text,) = events.Tensors("rollouts/training/text_summary")[0].tensor_proto.string_val
    assert text.decode().count("response: sampled") == 3


def test_rows_of_a_step_that_failed_are_not_saved(config: Callable[..., EchoConfig]) -> None:
    settings = config(report={"rollouts": {"every": 1}})
    with pytest.raises(WorkerError):
        train(settings, fails_at=2)
    assert [line["step"] for line in lines(settings)] == [0, 1]
    assert list(saved_scores(settings, "training")) == [1]


def test_rows_outside_of_a_step_are_rejected(config: Callable[..., EchoConfig]) -> None:
    with pytest.raises(UserError, match=r"run\.save_rollouts\b"), Run(config()) as run:
        run.save_rollouts(Batch.from_rows([{"prompt": "a", "response": "b"}]))


def test_a_run_that_fails_before_its_first_result_leaves_no_folder(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    prompts = stream(settings)
    with pytest.raises(WorkerError, match=r"actor\.update\b"), Run(settings) as run:
        actor = run.group("actor", Echo, 0)
        for batch in run.rollouts(actor, prompts, policy=actor):
            run.log(actor.update(batch))
    assert not settings.output.exists()


def test_a_run_that_fails_later_keeps_its_steps(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    with pytest.raises(WorkerError, match=r"actor\.update .*rank 0\b"):
        train(settings, fails_at=3)
    assert [line["step"] for line in lines(settings)] == [0, 1, 2]
    assert not (settings.output / "summary.json").exists()
    calls = {event["name"] for event in json.loads((settings.output / "trace.json").read_text())["traceEvents"]}
    assert "update" in calls


class Judge(Worker):
    """Rejects one call of `score`, as a reward function that returns an invalid value does."""

    stateless = True

    def __init__(self, fails_at: int) -> None:
        self.num_calls, self.fails_at = 0, fails_at

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("version",), writes=("scores",))
    def score(self, batch: TensorDict) -> TensorDict:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise UserError("the reward is not finite")
        return make_tensordict({"scores": torch.ones(num_rows(batch))})


def train_judged(config: EchoConfig, fails_at: int) -> None:
    prompts = stream(config)
    with Run(config) as run:
        actor, judge = run.group("actor", Counting), run.group("reward", Judge, fails_at)
        run.add_checkpointable(actor)
        for batch in run.rollouts(actor, prompts, policy=actor):
            batch["scores"] = judge.score(batch)
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
        run.finish()


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_an_invalid_reward_saves_the_weights_of_a_run_without_checkpoints(
    backend: str,
    config: Callable[..., EchoConfig],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    judged = config(steps=6, backend=backend)
    with pytest.raises(WorkerUserError, match="reward"):
        train_judged(judged, fails_at=4)
    assert [line["step"] for line in lines(judged)][:2] == [1, 2]
    # The driver submits at most one more step before it notices the failure.
    assert int((judged.output / "model" / "weights").read_text()) in (3, 4)
    assert str(judged.output / "model") in "".join(capsys.readouterr().out.split())


def train_until(config: EchoConfig, action: Callable[[], object]) -> None:
    """Trains with many metrics, and calls `action` in step 3."""
    prompts = stream(config)
    with Run(config) as run:
        actor = run.group("actor", Echo)
        for batch in run.rollouts(actor, prompts, policy=actor):
            if run.step == 3:
                action()
            run.log(actor.update(batch), {f"metric_{i}": Mean(0.5, 1) for i in range(200)})
            run.sync_weights(actor, actor)


@pytest.mark.parametrize("has_tensorboard", [False, True])
def test_a_full_disk_is_one_message_that_names_the_output_folder(
    config: Callable[..., EchoConfig], capsys: pytest.CaptureFixture[str], has_tensorboard: bool
) -> None:
    settings = config(steps=100, report={"rollouts": None, "tensorboard": has_tensorboard})
    with ExitStack() as disk:
        assert exit_code(lambda: train_until(settings, lambda: disk.enter_context(file_size_limit(30_000)))) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and not missing_facts(output.err, settings.output, "output")
    assert "Traceback" not in output.out and "Errno" not in output.out


def test_a_lost_output_folder_is_one_message_that_names_it(
    config: Callable[..., EchoConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(steps=100)
    assert exit_code(lambda: train_until(settings, lambda: shutil.rmtree(settings.output))) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and not missing_facts(output.err, settings.output)
    assert "Traceback" not in output.out and "Errno" not in output.out


def test_an_invalid_reward_in_the_first_step_leaves_no_folder(config: Callable[..., EchoConfig]) -> None:
    judged = config()
    with pytest.raises(WorkerUserError, match="reward"):
        train_judged(judged, fails_at=1)
    assert not judged.output.exists()
