"""A replay repeats a recorded step bitwise, for all recipes, schedules and placements, and finds what differs."""

import inspect
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl import Batch
from flowrl.cli import main
from flowrl.config import CheckFailed, Placement, RunConfig, UserError
from flowrl.run.loop import Run
from flowrl.run.replay.recording import read_recording
from flowrl.run.replay.replayed_run import ReplayedRun
from flowrl.run.replay.step_replay import RESULT, replay_step
from flowrl.workers import Actor, Rollout
from recipes.ppo.train import train as train_ppo
from tests.errors import missing_facts, rejects
from tests.run.replay.replay_cases import CASES, PPO, RECORDED, Case, metrics_without_clock

ROLES = ("actor", "critic", "reference", "reward", "rollout")
SPLIT = Placement(
    device="cpu",
    pools={"train": [1], "rest": [1]},
    roles={"actor": "train", "reference": "train"} | dict.fromkeys(("critic", "reward", "rollout"), "rest"),
)
TWO_RANKS = Placement(device="cpu", pools={"main": [2]}, roles=dict.fromkeys(ROLES, "main"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output / "model" / "model.safetensors")


def replay(case: Case, config: RunConfig, step: int, output: Path, **options: Any) -> dict[str, Any]:
    """Replays a step and returns the contents of `replay.json`. Raises CheckFailed if results differ."""
    replay_step(read_recording(config.output, step), config, case.train, output=output, **options)
    return json.loads((output / RESULT).read_text())


def assert_identical(result: dict[str, Any]) -> None:
    assert result["is_identical"]
    counts = {part["name"]: part["count"] for part in result["compared"]}
    assert counts["calls"] and counts["metrics"] and counts["state of actor"]


def test_a_replay_is_bitwise_identical_and_writes_nothing_into_the_run(recorded: RunConfig, tmp_path: Path) -> None:
    before = contents(recorded.output)
    for step in RECORDED:
        assert_identical(replay(PPO, recorded, step, tmp_path / f"{step}"))
    assert contents(recorded.output) == before


def test_a_recording_does_not_change_the_run(recorded: RunConfig, task: Path, tmp_path: Path) -> None:
    plain = PPO.build(task, tmp_path / "plain")
    PPO.train(plain)
    assert metrics_without_clock(recorded.output) == metrics_without_clock(plain.output)
    others = weights(plain)
    assert weights(recorded).keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights(recorded).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_recipe_and_schedule_is_replayed_bitwise(name: str, task: Path, tmp_path: Path) -> None:
    case = CASES[name]
    config = case.build(task, tmp_path / "recorded", steps=2, record=RECORDED)
    case.train(config)
    for step in RECORDED:
        assert_identical(replay(case, config, step, tmp_path / f"{step}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "async"])
def test_no_recipe_or_schedule_depends_on_a_recording(name: str, task: Path, tmp_path: Path) -> None:
    case = CASES[name]
    configs = [case.build(task, tmp_path / f"{len(steps)}", steps=2, record=steps) for steps in ((), RECORDED)]
    for config in configs:
        case.train(config)
    assert metrics_without_clock(configs[0].output) == metrics_without_clock(configs[1].output)
    first, second = map(weights, configs)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_a_step_on_ray_is_replayed_bitwise_in_one_process(ray_session: None, task: Path, tmp_path: Path) -> None:
    config = PPO.build(task, tmp_path / "run", record=RECORDED, backend="ray", placement=SPLIT)
    PPO.train(config)
    for step in RECORDED:
        assert_identical(replay(PPO, config, step, tmp_path / f"{step}"))


@pytest.mark.slow
def test_a_step_of_two_ranks_is_equal_up_to_rounding_on_one_and_bitwise_on_two(
    ray_session: None, task: Path, tmp_path: Path
) -> None:
    config = PPO.build(task, tmp_path / "run", record=(2,), backend="ray", placement=TWO_RANKS)
    PPO.train(config)
    result = replay(PPO, config, 2, tmp_path / "inline")
    assert not result["is_identical"] and not any(part["differences"] for part in result["compared"])
    assert_identical(replay(PPO, config, 2, tmp_path / "ray", backend="ray"))


@pytest.mark.slow
def test_a_step_of_a_sharded_16_bit_model_is_replayed_bitwise_by_default(
    ray_session: None, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The inline backend computes the norms of this model in float32."""
    config = PPO.build(task, tmp_path / "run", record=(2,), backend="ray")
    settings = config.model_dump()
    settings["actor"]["engine"] |= {"strategy": "fsdp", "compute_dtype": "bfloat16"}
    PPO.train(type(config).model_validate(settings))
    assert main(["replay", str(config.output), "--step", "2"]) == 0
    assert "bitwise identical" in capsys.readouterr().out
    main(["replay", str(config.output), "--step", "2", "--backend", "inline"])
    assert "actor was sharded" in capsys.readouterr().out


# What differs is named.


def test_a_changed_setting_is_found_at_the_first_call_that_reads_it(recorded: RunConfig, tmp_path: Path) -> None:
    settings = recorded.model_dump()
    settings["algorithm"]["lam"] = 0.5
    changed = type(recorded).model_validate(settings)
    with rejects("tasks.compute_columns", "column", error=CheckFailed):
        replay(PPO, changed, 2, tmp_path / "out")
    result = json.loads((tmp_path / "out" / RESULT).read_text())
    different = {part["name"] for part in result["compared"] if part["differences"]}
    assert {"calls", "metrics", "state of actor", "state of critic"} <= different and not result["is_identical"]


def test_a_changed_weight_of_a_frozen_model_is_found(recorded: RunConfig, task: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    changed = load_file(path)
    name = next(name for name, weight in changed.items() if weight.ndim == 2)
    changed[name][0, 0] += 1
    save_file(changed, path, metadata={"format": "pt"})
    settings = recorded.model_dump()
    settings["reference"]["model"]["path"] = tmp_path / "model"
    with rejects("1", "reference.logprobs", "logprobs", error=CheckFailed):
        replay(PPO, type(recorded).model_validate(settings), 1, tmp_path / "out")


def without_critic_updates(config: Any, start: Callable[[Any], Any]) -> None:
    """The PPO recipe with a changed loop body."""
    source = inspect.getsource(train_ppo).replace("critic.update(minibatch), ", "")
    scope = dict(vars(inspect.getmodule(train_ppo)))
    exec(source, scope)  # the recipe, whose only change is the removed call
    scope["train"](config, start)


def test_a_changed_recipe_is_found_at_the_first_call_that_differs(recorded: RunConfig) -> None:
    with rejects("critic.update", "actor.update", error=CheckFailed):
        replay_step(read_recording(recorded.output, 2), recorded, without_critic_updates)


def test_a_recipe_without_a_loop_is_rejected(recorded: RunConfig) -> None:
    def train(config: Any, start: Callable[[Any], Any]) -> None:
        with start(config):
            pass

    with rejects("2", "run.rollouts"):
        replay_step(read_recording(recorded.output, 2), recorded, train)


def test_a_loop_body_that_generates_is_rejected(recorded: RunConfig) -> None:
    def train(config: Any, start: Callable[[Any], Any]) -> None:
        with start(config) as run:
            rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=config.seed)
            actor = run.group("actor", Actor, config.actor)
            for batch in run.rollouts(rollout, iter(()), policy=actor):  # pyright: ignore[reportArgumentType]
                rollout.generate(batch)

    with rejects("rollout.generate"):
        replay_step(read_recording(recorded.output, 2), recorded, train)


def train_two_steps(
    config: Any, start: Callable[[Any], Any] = Run, *, failing: int = 2, error: BaseException | None = None
) -> None:
    """A training function with a step that fails. Both steps succeed if `failing` is 0."""
    with start(config) as run:
        actor = run.group("actor", Actor, config.actor)
        run.add_checkpointable(actor)
        rows = Batch.from_columns(tokens={"input_ids": [1, 2, 3, 4]}, lengths=[2, 2])
        for batch in run.batches([rows, rows], policy=actor):
            actor.logprobs(batch)
            if run.step == failing:
                raise error or UserError("the step is broken")


@pytest.fixture
def failed(task: Path, tmp_path: Path) -> RunConfig:
    """Returns the config of a run that has recorded its second step, which failed."""
    config = CASES["sft"].build(task, tmp_path / "run", steps=2, epochs=None, record=(2,))
    with rejects("broken"):
        train_two_steps(config)
    return config


def test_an_exception_in_the_recorded_step_is_replayed(failed: RunConfig) -> None:
    with rejects("fails", "broken", error=CheckFailed):
        replay_step(read_recording(failed.output, 2), failed, train_two_steps)


def test_a_failure_of_the_first_step_is_kept_if_the_step_is_recorded(task: Path, tmp_path: Path) -> None:
    config = CASES["sft"].build(task, tmp_path / "run", steps=2, epochs=None, record=(1,))
    with rejects("broken"):
        train_two_steps(config, failing=1)
    with rejects("fails", "broken", error=CheckFailed):
        replay_step(read_recording(config.output, 1), config, partial(train_two_steps, failing=1))


def test_a_recorded_step_is_complete_although_the_next_step_fails(task: Path, tmp_path: Path) -> None:
    config = CASES["sft"].build(task, tmp_path / "run", steps=2, epochs=None, record=(1,))
    with rejects("broken"):
        train_two_steps(config, failing=2)
    recording = read_recording(config.output, 1)
    assert recording.values["error"] is None and recording.values["calls"]
    replay_step(recording, config, partial(train_two_steps, failing=0))  # raises an error if results differ


def test_an_interrupted_first_step_leaves_no_files(task: Path, tmp_path: Path) -> None:
    config = CASES["sft"].build(task, tmp_path / "run", steps=2, epochs=None, record=(1,))
    with pytest.raises(KeyboardInterrupt):
        train_two_steps(config, failing=1, error=KeyboardInterrupt())
    assert not (config.output / "recorded").exists() and not (config.output / "config.yaml").exists()


@pytest.mark.parametrize("overrides", [(), ("actor.optimizer.lr=0.1",)])
def test_a_step_that_failed_in_the_run_and_now_succeeds_is_an_error_only_without_overrides(
    overrides: tuple[str, ...], failed: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = partial(replay_step, read_recording(failed.output, 2), failed, partial(train_two_steps, failing=0))
    if overrides:
        replay(overrides=overrides, output=tmp_path / "out")
        result = json.loads((tmp_path / "out" / RESULT).read_text())
        assert (result["overrides"], result["is_identical"], result["compared"]) == (list(overrides), False, [])
        assert "broken" in result["error_in_run"]
        assert not missing_facts(capsys.readouterr().out, "succeeds", "actor.optimizer.lr", 0.1, "broken")
    else:
        with rejects("succeeds", "broken", error=CheckFailed):
            replay()


def test_a_replayed_run_has_the_methods_of_a_run() -> None:
    def parameters(function: Callable[..., object]) -> list[str]:
        return list(inspect.signature(function).parameters)

    methods = {name for name, value in vars(Run).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert not (missing := methods - vars(ReplayedRun).keys()), missing
    assert {name: parameters(getattr(ReplayedRun, name)) for name in methods} == {
        name: parameters(getattr(Run, name)) for name in methods
    }
