from pathlib import Path

import pytest

from flowrl.checkpoints.run_files import read_config
from flowrl.checkpoints.run_folder import folder_lock
from flowrl.config import UserError
from flowrl.report.page.run_data import evaluations, run_data, unique_names
from tests.report.page.generated_run import write_run


def test_evaluations_have_first_and_last_values_with_intervals() -> None:
    records = [
        {"step": 0, "accuracy": 0.25, "evaluation/accuracy_low": 0.2, "evaluation/accuracy_high": 0.3},
        {"step": 1, "reward": 1.0},
        {
            "step": 4,
            "accuracy": 0.5,
            "accuracy/hard": 0.1,
            "evaluation/accuracy_low/hard": 0.0,
            "evaluation/accuracy_high/hard": 0.2,
        },
    ]
    first, hard = evaluations(records)
    assert first == {
        "name": "accuracy",
        "first_step": 0,
        "first": 0.25,
        "first_interval": [0.2, 0.3],
        "last_step": 4,
        "last": 0.5,
        "last_interval": None,
        "has_failures": False,
    }
    assert (hard["name"], hard["first_step"], hard["last_interval"]) == ("accuracy/hard", 4, [0.0, 0.2])


def test_an_evaluation_without_failed_rewards_has_their_metrics_if_another_one_has() -> None:
    records = [
        {"step": 0, "accuracy/hard": 0.25},
        {
            "step": 2,
            "accuracy/hard": 0.5,
            "evaluation/failed/hard": 3,
            "evaluation/failed_as_worst/hard": 0.4,
            "evaluation/failed_as_best/hard": 0.6,
        },
        {"step": 4, "accuracy/hard": 0.75},
        {"step": 5, "reward": 1.0},
    ]
    shown = {entry["name"]: (entry["first"], entry["last"], entry["last_step"]) for entry in evaluations(records)}
    assert shown == {
        "accuracy/hard": (0.25, 0.75, 4),
        "evaluation/failed/hard": (0, 0, 4),
        "evaluation/failed_as_worst/hard": (0.25, 0.75, 4),
        "evaluation/failed_as_best/hard": (0.25, 0.75, 4),
    }
    assert [entry["has_failures"] for entry in evaluations(records[:2])] == [True, False, False, False]


def test_names_have_as_many_folders_as_necessary(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/ppo", "b/ppo", "c/grpo")]
    assert unique_names(folders) == ["a/ppo", "b/ppo", "grpo"]
    assert unique_names([tmp_path / "a/x/ppo", tmp_path / "b/x/ppo"]) == ["a/x/ppo", "b/x/ppo"]


def test_the_same_run_twice_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="twice"):
        unique_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "grpo", num_steps=10, every=5)


def test_the_overview_names_recipe_roles_and_status(run: Path) -> None:
    config = read_config(run)
    data = run_data(run, "grpo", config, [{"step": 10, "elapsed_s": 3.0}], {"seconds": 5.0, "interrupted_by": None})
    assert (data["recipe"], data["status"], data["steps"], data["seconds"]) == ("grpo", "complete", 10, 5.0)
    assert {role["name"]: role["pool"] for role in data["roles"]} == {
        "actor": "trainer",
        "rollout": "makers",
        "reference": "trainer",
        "reward": "trainer",
    }
    assert data["system"]["versions"]["python"]
    (finding,) = data["findings"]
    assert (finding["check"], finding["step"], finding["last_step"]) == ("gradient_spike", 31, 33)


def test_a_run_without_health_checks_has_no_list_of_findings(run: Path, tmp_path: Path) -> None:
    assert run_data(tmp_path, "run", read_config(run), [], None)["findings"] is None


@pytest.mark.parametrize(
    ("summary", "status"),
    [(None, "ended early"), ({"interrupted_by": "SIGINT"}, "interrupted"), ({"interrupted_by": None}, "complete")],
)
def test_the_status_depends_on_the_summary(run: Path, summary: dict | None, status: str) -> None:
    assert run_data(run, "grpo", read_config(run), [], summary)["status"] == status


def test_a_locked_folder_is_a_running_run(run: Path) -> None:
    with folder_lock(run):
        assert run_data(run, "grpo", read_config(run), [], None)["status"] == "running"
