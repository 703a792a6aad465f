"""Profiles of the calls of a step (`report.profile`), and the metrics of its devices."""

import gzip
import json
from pathlib import Path

import pytest

from flowrl.config import ConfigError, RunConfig
from flowrl.controller.calls.profiled_step import ProfiledStep
from flowrl.report.page.run_data import find_profiles
from recipes.sft.train import train
from tests.configs import plan_run
from tests.errors import missing_facts
from tests.run.replay.replay_cases import sft_config


@pytest.fixture(scope="module")
def profiled(task: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of two steps with a profile of the second one."""
    report = {"tensorboard": False, "profile": {"steps": [2]}, "peak_tflops": 0.5}
    config = sft_config(task, tmp_path_factory.mktemp("profiled") / "run", report=report)
    train(config)
    return config


def test_only_the_calls_of_the_requested_step_have_profiles(profiled: RunConfig) -> None:
    files = [path.relative_to(profiled.output).as_posix() for path in profiled.output.rglob("*.json.gz")]
    assert files == ["profiles/step-000002/actor-0/001-update.json.gz"]


def test_a_profile_has_the_operations_of_the_update(profiled: RunConfig) -> None:
    (file,) = profiled.output.glob("profiles/step-000002/actor-0/*-update.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("ph") == "X"}
    update, optimizer = spans["actor.update"], spans["Optimizer.step#AdamW.step"]
    assert update["ts"] <= optimizer["ts"] and optimizer["ts"] + optimizer["dur"] <= update["ts"] + update["dur"]
    assert "aten::mm" in spans


def test_the_report_links_profiles_relative_to_its_own_folder(profiled: RunConfig, tmp_path: Path) -> None:
    name = "step 2: actor-0/001-update.json.gz"
    (link,) = find_profiles(profiled.output, profiled.output)
    assert link == {"name": name, "path": "profiles/step-000002/actor-0/001-update.json.gz"}
    (link,) = find_profiles(profiled.output, tmp_path)
    assert link["name"] == name and (tmp_path / link["path"]).is_file()


def test_calls_of_other_ranks_and_of_a_role_that_generates_continuously_have_no_profiles(tmp_path: Path) -> None:
    step = ProfiledStep(tmp_path, ranks=(0, 2), excluded_role="rollout")
    assert step.path("actor", 0, "logprobs") == tmp_path / "actor-0/001-logprobs.json.gz"
    assert step.path("actor", 1, "logprobs") is None
    assert step.path("actor", 2, "logprobs") == tmp_path / "actor-2/001-logprobs.json.gz"
    assert step.path("actor", 0, "update") == tmp_path / "actor-0/002-update.json.gz"
    assert step.path("rollout", 0, "poll") is None


def test_each_step_has_the_throughput_and_the_memory_of_its_roles(profiled: RunConfig) -> None:
    lines = [json.loads(line) for line in (profiled.output / "metrics.jsonl").read_text().splitlines()]
    for metrics in (line for line in lines if line["step"]):
        usage = {name: value for name, value in metrics.items() if name.startswith("usage/")}
        names = ("tokens_per_s", "tflops", "mfu", "allocated_gb", "reserved_gb", "free_gb")
        assert usage.keys() == {f"usage/actor/{name}" for name in names}
        assert min(usage.values()) > 0
        assert usage["usage/actor/mfu"] == pytest.approx(usage["usage/actor/tflops"] / 0.5)


@pytest.mark.parametrize(
    ("profile", "facts"),
    [
        ({"steps": [1, 9]}, ["report.profile.steps", 9, 2]),
        ({"steps": [1], "ranks": [0, 3]}, ["report.profile.ranks", 3, 0]),
    ],
)
def test_steps_and_ranks_that_a_run_does_not_have_are_rejected(
    task: Path, tmp_path: Path, profile: dict[str, list[int]], facts: list[object]
) -> None:
    config = sft_config(task, tmp_path / "run", steps=2, epochs=None, report={"profile": profile})
    with pytest.raises(ConfigError) as error:
        plan_run(config)
    assert not missing_facts(str(error.value), *facts)
