"""Runs with injected faults continue or resume with the numbers of an undisturbed run, and report the cause.

`python -m tests.chaos` runs the other cases (docs/failures.md).
"""

import math
import os
import re
import time
from pathlib import Path

import pytest

from flowrl import Dispatch, Worker, register
from flowrl.config import RolloutLogConfig
from flowrl.report.rollout_log import RolloutLog
from recipes.ppo import train as recipe
from tests.chaos.faults import DISK, Case, all_cases, draw_cases, is_about
from tests.chaos.runs import commit_name, run_cases
from tests.chaos.session import FOREIGN, PROGRESS, Result, find_difference, find_wrong_steps, read_prompt_ids
from tests.chaos.table import BEGIN, END, PAGE, read_results, render_table
from tests.chaos.training import REPLACED
from tests.chaos.variants import ALL_ROWS, BATCH_SIZE, ROLES, SCHEDULES, variant_config
from tests.chaos.workers import BETWEEN_CALLS, FOLDER, traced
from tests.conftest import ClusterMaker

CASES = {case.name: case for case in all_cases()}
RANDOM_FAULTS_S = 600.0
"""Seconds in which the slow test of a schedule injects faults; `python -m tests.chaos` runs any number of cases."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the undisturbed runs."""
    return tmp_path_factory.mktemp("chaos")


def run(cases: list[Case], cache: Path, steps: int, seed: int = 0, until_s: float = math.inf) -> list[Result]:
    return [result for results in run_cases(cases, cache, seed, steps, until_s) for result in results]


def test_case_names_are_unique_and_cover_all_schedules() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.schedule for case in cases} == SCHEDULES.keys()


def test_cases_are_drawn_equally_often_and_reproducibly() -> None:
    cases = all_cases()[:10]
    drawn = draw_cases(cases, 25, seed=3)
    assert drawn == draw_cases(cases, 25, seed=3)
    assert {drawn.count(case) for case in cases} == {2, 3}


def test_a_difference_from_the_undisturbed_run_is_found() -> None:
    reference = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25, "accuracy": 0.75}]
    assert find_difference(reference, reference) is None and find_difference(reference[:1], reference) is None
    assert find_difference([], reference) and find_difference([*reference, {"step": 3}], reference)
    assert find_difference([reference[0], reference[1] | {"reward": 0.125}], reference)
    assert find_difference([{"step": 1}, reference[1]], reference, is_interrupted=True)


def test_the_last_step_of_an_interrupted_run_may_lack_its_evaluation() -> None:
    reference = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25, "accuracy": 0.75}]
    records = [reference[0], {"step": 2, "reward": 0.25}]
    assert find_difference(records, reference) and find_difference(records, reference, is_interrupted=True) is None
    assert find_difference([reference[0], {"step": 2, "reward": 0.5}], reference, is_interrupted=True)
    assert find_difference([reference[0], {"step": 2, "accuracy": 0.75}], reference, is_interrupted=True)


def test_prompts_that_are_trained_twice_or_lost_are_found() -> None:
    steps = {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    assert find_wrong_steps(steps, 3, 2, num_dropped=0) == set()
    assert find_wrong_steps(steps | {3: [4, 1]}, 3, 2, num_dropped=0) == {1, 3}
    assert find_wrong_steps(steps | {3: [4, 6]}, 3, 2, num_dropped=0) == {3}
    assert find_wrong_steps(steps | {3: [4, 6]}, 3, 2, num_dropped=1) == set()
    assert find_wrong_steps(steps | {3: [4, 6, 5]}, 3, 2, num_dropped=0) == {3}
    assert find_wrong_steps({1: [0, 1], 3: [4, 5]}, 3, 2, num_dropped=2) == {2}


def test_a_wrong_prompt_in_the_saved_rows_of_a_run_is_found_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    def write(log: RolloutLog, *steps: int) -> None:
        for step in steps:
            rows = range(BATCH_SIZE * (step - 1), BATCH_SIZE * step)
            log.write("training", step, [{"prompt_id": row} for row in rows])

    config = RolloutLogConfig.model_validate(ALL_ROWS)
    write(RolloutLog(tmp_path, config), 1, 2, 3)
    write(RolloutLog(tmp_path, config, last_step=1), 2, 3)
    prompt_ids = read_prompt_ids(tmp_path)
    assert [len(prompts) for prompts in prompt_ids.values()] == [BATCH_SIZE] * 3
    assert find_wrong_steps(prompt_ids, 3, BATCH_SIZE, num_dropped=0) == set()

    shard = tmp_path / "training-000003.jsonl"
    shard.write_text(re.sub(rf'"prompt_id": ?{2 * BATCH_SIZE}\b', '"prompt_id": 0', shard.read_text()))
    assert find_wrong_steps(read_prompt_ids(tmp_path), 3, BATCH_SIZE, num_dropped=0) == {1, 3}


def test_every_row_of_every_step_is_saved(tmp_path: Path) -> None:
    config = variant_config(tmp_path, tmp_path / "run", "async", "hf", steps=2, records=tmp_path)
    log = RolloutLog(tmp_path, config.report.rollouts)
    settings = [log.training_settings(step) for step in (1, 2, 3, 4)]
    assert [own.rows for own in settings if own is not None] == [config.batch_size] * 4
    assert config.samples_per_prompt == 1  # so that a row has its own prompt


def test_the_recipe_uses_the_traced_workers_of_all_roles() -> None:
    assert REPLACED.keys() <= {*recipe.train.__code__.co_names}
    assert not any(getattr(recipe, name) is worker for name, worker in REPLACED.items())
    assert {*(name.lower() for name in REPLACED), "reward", "environment"} == {*ROLES}  # the run starts these two


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("faults", "steps"),
    [(["scoring_process-kill-any", "reward-kill-any"], 18), (["rollout-stop-any", "actor-kill-update"], 24)],
)
def test_metrics_after_faults_equal_those_of_an_undisturbed_run(cache: Path, faults: list[str], steps: int) -> None:
    cases = [CASES[f"sync-hf-{fault}"] for fault in faults]
    results = run(cases, cache, steps)
    assert [result.case for result in results] == [case.name for case in cases]
    assert [(result.outcome, result.numbers) for result in results] == [("continued", True)] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_metrics_after_random_faults_equal_those_of_an_undisturbed_run(cache: Path, schedule: str) -> None:
    is_root = os.getuid() == 0  # only root can mount a small disk
    cases = [case for case in all_cases() if case.schedule == schedule and (is_root or case.target != DISK)]
    seed = int(commit_name().removesuffix("+"), 16)  # each commit selects other cases
    results = run(draw_cases(cases, len(cases), seed), cache, 60, seed, time.monotonic() + RANDOM_FAULTS_S)
    assert len(results) >= 5, "a fault takes two minutes"
    assert [result for result in results if not result.correct] == []


@traced
class Nested(Worker):
    """Its `update` calls another registered method, as that of a trained model does."""

    @register(Dispatch.ONE_TO_ALL)
    def update(self) -> str:
        self.optim_step()
        return (Path(os.environ[FOLDER]) / "now" / "actor-0").read_text().split()[1]

    @register(Dispatch.ONE_TO_ALL)
    def optim_step(self) -> None: ...


def test_a_method_that_calls_another_one_remains_the_current_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_cluster: ClusterMaker
) -> None:
    (tmp_path / "now").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    group = open_cluster("inline", {"main": [1]}, {"actor": "main"}).group("actor", Nested)
    assert group.update() == ["update"]
    assert (tmp_path / "now" / "actor-0").read_text().split()[1] == BETWEEN_CALLS


def test_a_report_has_only_lines_about_a_failure() -> None:
    lines = [
        "[2026-11-26 19:49:11,807 E 18829 19327] task_manager.cc:1545: Failed to push error",
        "health: step 10: idle_devices: a device of pool main (actor) is idle for 90% of the time",
        "environment on rank 0 lost its process; the replacement has taken over",
        "environment on rank 0 (node 0) failed: its process was killed (SIGKILL); replacing the process",
        "actor.update failed",
    ]
    assert [line for line in lines if not (FOREIGN.search(line) or PROGRESS.search(line))] == lines[-2:]


def test_the_report_of_a_child_process_has_no_lines_about_other_roles() -> None:
    case = CASES["async-episodes-environment_process-stop-update"]
    assert not is_about(case, "rollout rank 1 lost: 0 unfinished prompts are regenerated by other replicas")
    assert is_about(case, "environment on rank 0 failed: tests.recipes.turns:TwoTurns did not answer within 4 s")
    assert is_about(CASES["async-hf-rollout-kill-any"], "rollout rank 1 lost: 0 unfinished prompts are regenerated")


def test_the_page_has_the_table_of_the_results() -> None:
    text = PAGE.read_text()
    table = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert table == render_table(read_results())
