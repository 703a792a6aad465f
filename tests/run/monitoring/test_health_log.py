"""Findings of a run: messages, files, `health.stop_on`, and the state after a resume."""

import json
from collections.abc import Callable, Sequence

import pytest

from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.cli import exit_code
from flowrl.health import Finding, read_findings
from flowrl.run.loop import Run
from tests.errors import missing_facts
from tests.run.echo_run import QUIET, Counting, EchoConfig, lines, stream

Configs = Callable[..., EchoConfig]

HEALTHY, TRUNCATED = 0.1, 0.9


def train(config: EchoConfig, shares: Sequence[float], calls: list[Finding] | None = None) -> None:
    """Trains with a given share of truncated responses in each step. Adds the findings that a listener gets."""
    prompts = stream(config)
    with Run(config) as run:
        actor = run.group("actor", Counting)
        run.add_checkpointable(actor)
        run._observers._health.add_listener((calls if calls is not None else []).append)
        for batch in run.rollouts(actor, prompts, policy=actor):
            batch["scores"] = actor.score(batch)
            run.log(actor.update(batch), {"truncated_fraction": shares[run.step - 1]})
            run.sync_weights(actor, actor)
        run.finish()


@pytest.fixture
def settings(config: Configs) -> Configs:
    def make(*, stop_on: Sequence[str] = (), **changes: object) -> EchoConfig:
        health = {"steps": 2, "truncation": 0.5, "idle_devices": None, "stop_on": stop_on}
        return config(report=QUIET, evaluate_every=0, health=health, **changes)

    return make


def test_findings_are_shown_and_saved(settings: Configs, capsys: pytest.CaptureFixture[str]) -> None:
    run_config, calls = settings(steps=8), []
    train(run_config, [HEALTHY, *[TRUNCATED] * 7], calls)
    (finding,) = read_findings(run_config.output)
    assert (finding.check, finding.step, finding.last_step) == ("truncation", 3, 8)
    summary = json.loads((run_config.output / "summary.json").read_text())
    assert [Finding(**saved) for saved in summary["health"]] == [finding] and summary["stopped_by"] is None
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("health: step") == 1 and finding.message in output
    assert [(call.check, call.step) for call in calls] == [("truncation", 3)]


def test_a_healthy_run_has_an_empty_file(settings: Configs, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = settings(steps=4)
    train(run_config, [HEALTHY] * 4)
    assert (run_config.output / "health.jsonl").read_text() == ""
    assert "health:" not in capsys.readouterr().out


def test_stop_on_ends_the_run_after_a_saved_step_and_resume_continues(
    settings: Configs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the two runs of the same folder is stopped by its own finding, and the third one completes."""
    checkpoint = {"every": 100}
    shares = [HEALTHY, *[TRUNCATED] * 2, *[HEALTHY] * 6, *[TRUNCATED] * 3, *[HEALTHY] * 6]
    stopped = settings(steps=18, checkpoint=checkpoint, stop_on=["truncation"])
    assert exit_code(lambda: train(stopped, shares)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not missing_facts(error, "health.stop_on", "truncation", 3)
    assert Checkpoints(stopped.output).steps() == [4] and [line["step"] for line in lines(stopped)] == [1, 2, 3, 4]
    assert json.loads((stopped.output / "summary.json").read_text())["stopped_by"] in error

    resumed, calls = stopped.model_copy(update={"resume": "auto"}), []
    assert exit_code(lambda: train(resumed, shares, calls)) == 2
    assert [call.step for call in calls] == [11]
    assert exit_code(lambda: train(resumed, shares, calls)) == 0
    assert [line["step"] for line in lines(stopped)] == list(range(1, 19))

    continuous = settings(steps=18, output=stopped.output.parent / "continuous")
    train(continuous, shares)
    assert read_findings(stopped.output) == read_findings(continuous.output)
    assert [(finding.step, finding.last_step) for finding in read_findings(stopped.output)] == [(3, 3), (11, 12)]


def test_findings_after_the_checkpoint_are_dropped_on_resume(settings: Configs) -> None:
    """The second attempt has other metrics in the steps that it repeats."""
    first = settings(steps=6, checkpoint={"every": 4, "keep_last": None})
    with pytest.raises(IndexError):
        train(first, [*[HEALTHY] * 4, TRUNCATED])
    (first.output / "health.jsonl").write_text("")
    train(first.model_copy(update={"resume": "auto"}), [HEALTHY] * 6)
    assert read_findings(first.output) == []


def test_thresholds_may_change_on_resume(settings: Configs) -> None:
    first = settings(steps=4, checkpoint={"every": 2})
    train(first, [TRUNCATED] * 4)
    assert len(read_findings(first.output)) == 1
    changed = settings(steps=6, checkpoint={"every": 2}, resume="auto")
    health = changed.health.model_copy(update={"truncation": None})
    train(changed.model_copy(update={"health": health}), [TRUNCATED] * 6)
    assert read_findings(first.output) == []
