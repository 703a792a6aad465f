"""A start, `flowrl plan` and `flowrl check` run the checks of one list."""

import sys
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from rich.console import Console

from flowrl.config import ConfigError, RolePlacement, UserError, models_of
from flowrl.controller.placement.plan import PlacementError, Plan
from flowrl.run.checks.check_list import (
    ROWS,
    Level,
    Need,
    check_placement,
    check_start,
    find_missing,
    list_checks,
    run_checks,
)
from flowrl.run.checks.check_report import check_config
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.loop import Run
from flowrl.run.restarts import with_restarts
from tests.errors import rejects
from tests.run.checks.test_placement_checks import ActorRun, on, run_with
from tests.run.echo_run import EchoConfig, placed


def test_an_invalid_number_of_threads_in_the_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with rejects("OMP_NUM_THREADS", "many", error=UserError):
        check_start(run_with(on(1)))


def test_only_the_gpus_of_this_machine_are_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 7.5\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    placement = on(1).model_copy(update={"device": "cuda"})
    config = run_with(placement).model_copy(update={"devices": (1,)})
    with rejects("actor.engine.compute_dtype", "7.5", error=ConfigError):
        run_checks(CheckedRun(config), missing=Need.OUTPUT | Need.FILES)
    elsewhere = run_checks(CheckedRun(config, [1]), missing=Need.OUTPUT | Need.FILES)
    assert models_of(elsewhere.applied.config)["actor"].engine.compute_dtype == "bfloat16"


@pytest.fixture
def valid(config: Callable[..., EchoConfig]) -> Callable[..., EchoConfig]:
    """Returns a function that makes a config which passes all checks."""
    return partial(config, reward={"function": "recipes.quickstart.task:score"})


ROLES = {"actor": "main", "rollout": RolePlacement(pool="main", pp=2), "reward": "main"}


def called(program: Callable[[], object]) -> set[CodeType]:
    """Returns the code of all functions that a program calls."""
    codes: set[CodeType] = set()
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code))
    try:
        program()
    finally:
        sys.setprofile(None)
    return codes


def codes_up_to(level: Level) -> set[CodeType]:
    return {check.function.__code__ for check in list_checks(level)}


@pytest.mark.parametrize("level", Level)
def test_checks_are_listed_in_the_order_of_their_rows(level: Level) -> None:
    rows = [ROWS.index(check.row) for check in list_checks(level)]
    assert rows == sorted(rows)


def test_a_start_runs_every_check_of_its_levels(valid: Callable[..., EchoConfig]) -> None:
    settings = valid()
    assert codes_up_to(Level.FILES) <= called(lambda: check_start(settings))


def test_flowrl_check_runs_every_check_of_all_levels(valid: Callable[..., EchoConfig]) -> None:
    settings, console = valid(), Console(file=StringIO())
    checked = called(lambda: check_config(settings, lambda: lambda config: None, console=console))
    assert len(codes_up_to(Level.STEP)) == len(list_checks(Level.STEP)) and codes_up_to(Level.STEP) <= checked


def test_a_start_runs_the_cheap_checks_first(valid: Callable[..., EchoConfig]) -> None:
    """A placement that does not fit is reported before a file that is missing."""
    missing = {"train": "nowhere.jsonl", "max_prompt_tokens": 8}
    with rejects("placement.roles.rollout", "pp", error=ConfigError):
        check_start(valid(data=missing, placement=on(2).model_copy(update={"roles": ROLES})))
    with rejects("data.train", "nowhere.jsonl", error=ConfigError):
        check_start(valid(data=missing))


def joined(**changes: Any) -> ActorRun:
    return run_with(on(2)).model_copy(update={"address": "cluster:6379", **changes})


def test_a_start_plans_the_stated_devices_of_a_cluster() -> None:
    with rejects("placement.pools.main", error=PlacementError):
        check_start(joined(devices=(1,)))


def test_devices_of_several_nodes_need_a_cluster() -> None:
    config = joined(address=None, devices=(2, 2))
    for checks in (check_start, lambda config: check_placement(CheckedRun(config))):
        with rejects("devices", 2, "address", error=PlacementError):
            checks(config)
    planned = run_checks(CheckedRun(config), missing=Need.START | Need.FILES | Need.OUTPUT).plan
    assert planned.num_devices == 4


def test_the_checks_do_not_guess_whether_a_cluster_has_gpus() -> None:
    run = CheckedRun(joined(devices=(1,), placement=on(2).model_copy(update={"device": "auto"})))
    assert find_missing(run) == Need.PLAN | Need.MACHINE
    with rejects("actor.model.path", error=ConfigError):  # the next check
        run_checks(run)
    with rejects("cluster:6379", "placement.device", "auto", error=ConfigError):
        _ = run.plan


def test_the_checks_of_unknown_devices_are_skipped() -> None:
    run = CheckedRun(joined())
    assert find_missing(run) == Need.PLAN | Need.MACHINE
    run_checks(run, missing=Need.OUTPUT | Need.FILES)
    with rejects("cluster:6379", "--devices", error=ConfigError):
        _ = run.plan


def test_a_start_computes_the_plan_once(valid: Callable[..., EchoConfig]) -> None:
    settings, plans = valid(), list[Plan]()
    checked = check_start(settings)

    def train(config: EchoConfig) -> None:
        with Run(config) as run:
            plans.append(run.cluster.plan)

    with_restarts(train, settings, checked)
    with_restarts(train, valid(steps=7, output=settings.output.with_name("longer")), checked)
    assert all(plan is checked.plan for plan in plans) and len(plans) == 2


def test_a_recipe_that_changes_its_placement_gets_another_plan(valid: Callable[..., EchoConfig]) -> None:
    checked = check_start(valid())
    changed = checked.replace(valid(placement=placed(2)))
    assert [len(run.plan.pools["main"].slots) for run in (checked, changed)] == [1, 2]
