"""`Run`, with workers that only count versions."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Batch
from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.config import UserError
from flowrl.run.evaluation import Evaluation, evaluate
from flowrl.run.interrupt import Interrupted
from flowrl.run.loop import Run
from flowrl.workers import Reference
from tests.errors import rejects
from tests.run.echo_run import (
    QUIET,
    Counting,
    Echo,
    EchoConfig,
    held_out_prompts,
    lines,
    placed,
    saved_scores,
    stream,
    train,
)


def test_every_step_samples_from_the_version_of_the_previous_step(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    train(settings)
    assert [line.get("version") for line in lines(settings)] == [None, 0, 1, 2, 3]
    assert [line.get("sample") for line in lines(settings)] == [None, 0.5, 0.5, 0.5, 0.5]


def test_accuracy_is_in_the_record_of_the_last_trained_step(config: Callable[..., EchoConfig]) -> None:
    settings = config(evaluate_every=2)
    summary = train(settings)
    accuracies = {line["step"]: line["accuracy"] for line in lines(settings) if "accuracy" in line}
    assert accuracies == pytest.approx({0: 0.0, 2: 0.2, 4: 0.4})
    assert (summary["accuracy_before"], summary["accuracy_after"]) == pytest.approx((0.0, 0.4))
    assert summary["steps"] == 4 and summary["evaluation_rows"] == 3


def test_ray_gives_the_same_metrics(config: Callable[..., EchoConfig], ray_session: None, tmp_path: Path) -> None:
    inline, on_ray = config(output=tmp_path / "a"), config(output=tmp_path / "b", backend="ray", placement=placed(2))
    train(inline)
    train(on_ray)
    compared = ("step", "version", "sample", "accuracy")
    assert [[a.get(k) for k in compared] for a in lines(inline)] == [
        [b.get(k) for k in compared] for b in lines(on_ray)
    ]
    for kind in ("training", "evaluation"):
        assert saved_scores(inline, kind) == saved_scores(on_ray, kind) != {}


def test_deterministic_reaches_the_workers(config: Callable[..., EchoConfig], default_algorithms: None) -> None:
    train(config(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()


def test_evaluations_do_not_count_as_step_time(config: Callable[..., EchoConfig]) -> None:
    settings = config(evaluate_every=1)
    train(settings)  # every evaluation sleeps 0.5 s, one of them before the first step
    steps = lines(settings)[1:]
    assert all(line["seconds"] >= 0 for line in steps)
    assert steps[-1]["elapsed_s"] - sum(line["seconds"] for line in steps) > len(steps) * 0.5


def test_a_stream_that_ends_early_ends_the_run(config: Callable[..., EchoConfig]) -> None:
    settings = config(steps=9)
    rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(6)])
    with Run(settings) as run:
        actor = run.group("actor", Echo)
        for batch in run.batches(rows.minibatches(2), policy=actor):
            run.log(actor.update(batch))
        assert run.finish()["steps"] == 3
    assert [line["step"] for line in lines(settings)] == [1, 2, 3]


class Skipping(Iterator[Batch]):
    """A stream of numbered batches that counts how many were computed."""

    def __init__(self) -> None:
        self.index = self.num_computed = 0

    def __next__(self) -> Batch:
        self.num_computed += 1
        self.index += 1
        return Batch.from_rows([{"scores": float(self.index)}])

    def skip(self, num_batches: int) -> None:
        self.index += num_batches


def test_a_resumed_run_skips_batches_of_a_stream_that_supports_it(config: Callable[..., EchoConfig]) -> None:
    for steps, num_computed in ((2, 2), (4, 2)):
        settings = config(steps=steps, checkpoint={"every": 1}, resume="auto", report=QUIET)
        stream = Skipping()
        with Run(settings) as run:
            actor = run.group("actor", Counting)
            run.add_checkpointable(actor)
            for batch in run.batches(stream, policy=actor):
                run.log(actor.update(batch))
            run.finish()
        assert stream.num_computed == num_computed
    assert [line["reward"] for line in lines(settings)] == [1, 2, 3, 4]


def test_a_loop_can_break(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    with Run(settings) as run:
        actor: Any = run.group("actor", Echo)
        for batch in run.rollouts(actor, stream(settings), policy=actor):
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
            if run.step == 2:
                run.log(evaluate(actor, actor, held_out_prompts(settings)))
                break
        summary = run.finish()
    assert [line["step"] for line in lines(settings)] == [1, 2]
    assert lines(settings)[-1]["accuracy"] == summary["accuracy_after"] == pytest.approx(0.2)


def counted_steps(run: Run, num_batches: int = 9) -> Iterator[Batch]:
    rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(2 * num_batches)])
    return run.batches(rows.minibatches(2), policy=run.group("actor", Counting))


def test_metrics_before_the_loop_are_those_of_step_0_and_metrics_after_the_end_are_rejected(
    config: Callable[..., EchoConfig],
) -> None:
    settings = config(steps=1)
    with Run(settings) as run:
        run.log({"size": 3})
        for _ in counted_steps(run):
            run.log({"loss": 1.0})
        run.log({"rest": 2})
        run.finish()
        with pytest.raises(UserError, match=r"run\.log\b"):
            run.log({"late": 1})
    kept = [{name: line.get(name) for name in ("step", "size", "loss", "rest")} for line in lines(settings)]
    assert kept == [
        {"step": 0, "size": 3, "loss": None, "rest": None},
        {"step": 1, "size": None, "loss": 1, "rest": 2},
    ]


@pytest.mark.parametrize("value", ["0.5", True, None, [1.0]])
def test_a_logged_value_that_is_not_a_number_is_rejected_by_name(
    value: object, config: Callable[..., EchoConfig]
) -> None:
    wrong: Any = {"mine/value": value}
    with rejects("run.log", "mine/value", error=UserError), Run(config(report=QUIET)) as run:
        for _ in counted_steps(run):
            run.log(wrong)


@pytest.mark.parametrize(
    ("every", "due"),
    [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5]), (None, [0, 5]), (0, [])],
)
@pytest.mark.parametrize(("steps", "num_batches"), [(5, 9), (9, 5)])
def test_what_is_due_follows_the_initial_model_multiples_and_the_last_step(
    every: int | None, due: list[int], steps: int, num_batches: int, config: Callable[..., EchoConfig]
) -> None:
    """The run ends after 5 steps: those of the config, or those of a stream that ends earlier."""
    found = []
    with Run(config(steps=steps, report=QUIET)) as run:
        if run.due(every):
            found.append(run.step)
        for _ in counted_steps(run, num_batches):
            if run.due(every):
                found.append(run.step)
        assert not run.due(every)
        run.finish()
    assert found == due


def test_nothing_is_due_after_a_signal(config: Callable[..., EchoConfig]) -> None:
    found = []
    with pytest.raises(Interrupted), Run(config(steps=3, report=QUIET)) as run:
        for _ in counted_steps(run):
            signal.raise_signal(signal.SIGTERM)
            found += [run.due(1), run.due(None)]
        run.finish()
    assert found == [False, False]


def test_a_resumed_run_evaluates_no_initial_model_and_logs_after_its_loop(config: Callable[..., EchoConfig]) -> None:
    def attempt(steps: int) -> tuple[list[int], dict[str, Any]]:
        found = []
        settings = config(steps=steps, resume="auto", report=QUIET, checkpoint={"every": 1})
        with Run(settings) as run:
            actor: Any = run.group("actor", Counting)
            run.add_checkpointable(actor)
            rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(18)])
            if run.due(1):
                found.append(run.step)
            run.log(Evaluation({"accuracy": 0.0}, 3))
            for _ in run.batches(rows.minibatches(2), policy=actor):
                run.log({"loss": 1.0})
                if run.due(1):
                    found.append(run.step)
            run.log(Evaluation({"accuracy": steps / 10}, 3))
            return found, run.finish()

    assert attempt(2)[0] == [0, 1, 2]  # the end of the run saves a checkpoint
    found, summary = attempt(4)
    assert found == [3, 4]
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["evaluation_rows"]) == (0.0, 0.4, 3)
    accuracies = {line["step"]: line["accuracy"] for line in lines(config()) if "accuracy" in line}
    assert accuracies == {0: 0.0, 2: 0.2, 4: 0.4}


def test_a_step_that_is_not_the_last_is_saved_at_its_end(config: Callable[..., EchoConfig]) -> None:
    settings = config(steps=5, report=QUIET, checkpoint={"every": 2, "keep_last": None})
    saved = []
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(10)])
        for _ in run.batches(rows.minibatches(2), policy=actor):
            saved.append(run._saver.last_step)
        saved.append(run._saver.last_step)
        run.log({"loss": 1.0})
        run.finish()
    assert saved == [0, 0, 2, 2, 4, 4] and Checkpoints(settings.output).steps() == [2, 4, 5]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_that_fails_after_it_has_saved_its_model_resumes_from_its_last_step(
    is_interrupted: bool, config: Callable[..., EchoConfig]
) -> None:
    settings = config(steps=2, report=QUIET, checkpoint={"every": 5}, resume="auto")

    def attempt(*, fails: bool) -> dict[str, Any]:
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(4)])
        with Run(settings) as run:
            actor: Any = run.group("actor", Counting)
            run.add_checkpointable(actor)
            for _ in run.batches(rows.minibatches(2), policy=actor):
                run.log({"loss": run.step})
                if is_interrupted and fails:
                    signal.raise_signal(signal.SIGINT)
            run.save_model(actor)
            if fails:
                raise RuntimeError("killed")
            return run.finish()

    with pytest.raises(RuntimeError):
        attempt(fails=True)
    assert settings.output.joinpath("model").exists()
    assert Checkpoints(settings.output).steps() == [1 if is_interrupted else 2]
    assert attempt(fails=False)["steps"] == 2
    assert [line["loss"] for line in lines(settings)] == [1, 2]


def test_saving_the_model_before_or_in_the_loop_saves_no_checkpoint(config: Callable[..., EchoConfig]) -> None:
    settings = config(steps=2, report=QUIET, checkpoint={"every": 2}, resume="auto")
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        run.save_model(actor)
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(4)])
        for _ in run.batches(rows.minibatches(2), policy=actor):
            run.save_model(actor)
            assert Checkpoints(settings.output).steps() == []
            run.log({"loss": 1.0})
        run.finish()
    assert Checkpoints(settings.output).steps() == [2]


def test_a_checkpoint_has_the_evaluations_of_its_step(config: Callable[..., EchoConfig]) -> None:
    settings = config(steps=3, report=QUIET, checkpoint={"every": 2, "keep_last": None}, evaluate_every=2)
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(8)])
        held_out = {"": Batch.from_rows([{"prompt_id": 0}])}
        run.add_evaluation(held_out, lambda _: Evaluation({"accuracy": run.step / 10}, 2))
        for _ in run.batches(rows.minibatches(2), policy=actor):
            if run.due(settings.evaluate_every):
                run.log(Evaluation({"mine": 1.0}, 1))
        run.finish()
    saved = {step: Checkpoints(settings.output).read(step).driver() for step in (2, 3)}
    first = {"step": 0, "metrics": {"accuracy": 0.0}, "num_rows": 2}
    for step, state in saved.items():
        assert state["step"] == step
        assert state["outcomes"] == [
            first,
            {"step": step, "metrics": {"accuracy": step / 10, "mine": 1.0}, "num_rows": 3},
        ]


class Configured(Echo):
    def __init__(self, settings: Any) -> None:
        super().__init__()


def test_settings_of_a_group_are_compared_by_value(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    with Run(settings) as run:
        assert run.group("actor", Configured, settings.actor.model_copy()).role == "actor"
        assert run.group("rollout", Configured, settings=settings.rollout).role == "rollout"


def test_a_role_that_the_run_does_not_have_has_no_group(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    with Run(settings) as run:
        assert settings.reference is None and run.group("reference", Reference, settings.reference) is None


def test_a_null_setting_that_is_no_role_is_rejected(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    with rejects("run.group", "address", "EchoConfig", "actor", error=UserError), Run(settings) as run:
        assert settings.address is None
        run.group("address", Echo)


def test_a_class_in_place_of_a_role_is_rejected(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    group: Any = Run.group
    with rejects("run.group", "Echo", "actor", "config.actor", error=UserError), Run(settings) as run:
        group(run, Echo, settings.actor)


def test_settings_that_no_role_has_are_rejected(config: Callable[..., EchoConfig]) -> None:
    settings = config(report=QUIET)
    changed = settings.actor.model_copy(update={"entropy_coef": 0.1})
    with Run(settings) as run, rejects("actor", "ActorConfig", "config.ROLE", error=UserError):
        run.group("actor", Configured, changed)


def test_the_driver_is_at_most_one_step_ahead(config: Callable[..., EchoConfig]) -> None:
    settings, written = config(), []
    with Run(settings) as run:
        actor = run.group("actor", Echo)
        for batch in run.rollouts(actor, stream(settings), policy=actor):
            written.append(len(lines(settings)))
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
        run.finish()
    assert written == [0, 0, 1, 2]


@pytest.mark.parametrize("num_syncs", [0, 2])
def test_every_step_has_one_weight_sync(num_syncs: int, config: Callable[..., EchoConfig]) -> None:
    settings = config()
    with Run(settings) as run, rejects("run.sync_weights", num_syncs, 1, error=UserError):
        actor = run.group("actor", Echo)
        for batch in run.rollouts(actor, stream(settings), policy=actor):
            run.log(actor.update(batch))
            for _ in range(num_syncs):
                run.sync_weights(actor, actor)


@pytest.mark.parametrize(("every", "evaluated"), [(None, [0, 4]), (2, [0, 2, 4]), (0, [])])
def test_evaluate_every_selects_the_evaluated_steps(
    every: int | None, evaluated: list[int], config: Callable[..., EchoConfig]
) -> None:
    settings = config(evaluate_every=every)
    summary = train(settings)
    assert [line["step"] for line in lines(settings) if "accuracy" in line] == evaluated
    assert ("accuracy_after" in summary) == bool(evaluated)
    assert not evaluated or summary["accuracy_after"] == pytest.approx(0.4)


def train_until_signal(config: EchoConfig, number: signal.Signals, at_step: int) -> None:
    with Run(config) as run:
        actor: Any = run.group("actor", Echo)
        held_out = held_out_prompts(config)
        if run.due(config.evaluate_every):
            run.log(evaluate(actor, actor, held_out))
        for batch in run.rollouts(actor, stream(config), policy=actor):
            if run.step == at_step:
                signal.raise_signal(number)
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
            if run.due(config.evaluate_every):
                run.log(evaluate(actor, actor, held_out))
        run.save_model(actor)
        run.finish()


def test_a_signal_ends_the_run_after_its_step_with_all_results(config: Callable[..., EchoConfig]) -> None:
    settings = config(evaluate_every=2)
    with pytest.raises(Interrupted, match=r"SIGTERM .*step 2 of 4\b.* \S*out$"):
        train_until_signal(settings, signal.SIGTERM, at_step=2)
    assert [line["step"] for line in lines(settings)] == [0, 1, 2]
    assert (settings.output / "model" / "weights").read_text() == "2"
    assert (settings.output / "trace.json").exists()


def test_a_second_signal_aborts_the_run_and_writes_the_results_so_far(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    with pytest.raises(Interrupted, match=r"step 3 of 4\b"), Run(settings) as run:
        actor = run.group("actor", Echo)
        for batch in run.rollouts(actor, stream(settings), policy=actor):
            if run.step == 3:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.5)  # an earlier signal counts as a duplicate
                signal.raise_signal(signal.SIGINT)
            run.log(actor.update(batch))
            run.sync_weights(actor, actor)
    written = {path.name for path in settings.output.iterdir()}
    assert "trace.json" in written and not written & {"summary.json", "model"}


def test_the_summary_has_the_signal_and_no_last_evaluation(config: Callable[..., EchoConfig]) -> None:
    settings = config()
    with pytest.raises(Interrupted, match=r"step 1 of 4\b"):
        train_until_signal(settings, signal.SIGINT, at_step=1)
    summary = json.loads((settings.output / "summary.json").read_text())
    ending = {name: summary[name] for name in ("steps", "steps_requested", "interrupted_by")}
    assert ending == {"steps": 1, "steps_requested": 4, "interrupted_by": "SIGINT"}
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is None


def test_a_run_on_another_thread_is_not_interrupted(config: Callable[..., EchoConfig]) -> None:
    with ThreadPoolExecutor(1) as pool:
        summary = pool.submit(train, config()).result()
    assert summary["steps"] == 4 and summary["interrupted_by"] is None and summary["restarts"] == 0


def train_counting(settings: EchoConfig) -> None:
    with Run(settings) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(8)])
        for _ in run.batches(rows.minibatches(2), policy=actor):
            pass
        run.finish()


@pytest.mark.parametrize(
    ("variable", "threads", "warned"),
    [("2", None, False), ("1", None, True), ("1", 1, False)],
    ids=["equal", "changed", "set"],
)
def test_a_resume_with_another_number_of_threads_warns_once(
    variable: str,
    threads: int | None,
    warned: bool,
    config: Callable[..., EchoConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"report": QUIET, "checkpoint": {"every": 1}, "evaluate_every": 0, "resume": "auto"}
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    train_counting(config(**settings, threads=None, steps=1))
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    capsys.readouterr()
    train_counting(config(**settings, threads=threads, steps=2))
    torch.set_num_threads(before)
    assert capsys.readouterr().out.count("actor 2, now 1") == warned
