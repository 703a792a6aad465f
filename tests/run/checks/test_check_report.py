"""`flowrl check` finds problems before a run starts, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flowrl.cli import main
from flowrl.config import load
from flowrl.run.checks.check_list import ROWS
from flowrl.run.checks.check_report import ChecksFailed, check_config
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.errors import missing_facts, rejects
from tests.run import checked_rewards

TIED = "tests.run.checked_rewards:always_one"


Checked = Callable[..., dict[str, str]]

reported: dict[str, str] = {}
"""Check -> state of the last call, also if a check failed."""


@pytest.fixture
def check(recipe: Path) -> Iterator[Checked]:
    """Returns a function that checks the recipe with overrides, and returns check -> its state. `function` is the
    recipe's training function; without it, no step runs.
    """
    before = sorted(recipe.parent.rglob("*"))
    reported.clear()

    def run(
        *overrides: str, output: StringIO | None = None, function: Callable[[GRPOConfig], object] | None = None
    ) -> dict[str, str]:
        output = output or StringIO()
        try:
            check_config(load(recipe, overrides, GRPOConfig), lambda: function, console=Console(file=output, width=200))
        finally:
            rows = (re.split(r"\s{2,}", line) for line in output.getvalue().splitlines())
            states = {cells[0]: cells[1] for cells in rows if cells[0] in ROWS}
            reported.update(states)
        return states

    yield run
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_valid_config_passes_all_checks(check: Checked) -> None:
    output = StringIO()
    assert check(output=output, function=train) == dict.fromkeys(ROWS, "ok")
    assert len([line for line in output.getvalue().splitlines() if "│ 1 " in line and "│ 0 " in line]) == 8


def test_every_problem_is_one_sentence(check: Checked) -> None:
    with rejects("actor.model.path", "nowhere/model", "data.test", "none.jsonl", error=ChecksFailed) as caught:
        check("actor.model.path=nowhere/model", "data.test=none.jsonl")
    assert len(str(caught.value).splitlines()) == 3
    assert reported["files"] == "failed" and reported["step"] == reported["data"] == "not run"
    assert reported["placement"] == "ok"


def test_a_tracker_that_no_run_can_open_is_found(check: Checked) -> None:
    with rejects("report.trackers.0", "class", "write_metrics", error=ChecksFailed):
        check("report.trackers=[os:path]")
    assert reported["functions"] == "failed" and reported["files"] == "ok"


def test_more_tokens_than_the_model_supports_are_found(check: Checked) -> None:
    with rejects("data.max_prompt_tokens", "rollout.max_response_tokens", 100005, error=ChecksFailed):
        check("data.max_prompt_tokens=100000")
    assert reported["models"] == "failed" and reported["files"] == "ok"


def test_an_invalid_number_of_threads_is_found(check: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with rejects("OMP_NUM_THREADS", "many", error=ChecksFailed):
        check("threads=null")
    assert reported["functions"] == "failed"


def test_the_unknown_devices_of_a_cluster_are_no_failure(check: Checked) -> None:
    states = check("address=cluster:6379")
    assert (states["placement"], states["memory"], states["data"]) == ("skipped", "skipped", "ok")


def test_flowrl_plan_compares_the_models_with_the_tokenizer(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), changed_model(recipe, tmp_path / "m", vocab_size=12)]) == 2
    assert not missing_facts(capsys.readouterr().err, tmp_path / "m", 15, 12)


def test_a_reward_that_fails_for_an_empty_response_is_found(check: Checked) -> None:
    with rejects("fails_for_an_empty_response", "IndexError", error=ChecksFailed):
        check("reward.function=tests.run.checked_rewards:fails_for_an_empty_response")


@pytest.mark.slow
def test_a_reward_that_hangs_is_found(check: Checked) -> None:
    lines = Path(checked_rewards.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("time.sleep(600)"))
    with rejects("hangs", checked_rewards.__file__, line, "reward.timeout_s", error=ChecksFailed):
        check("reward.function=tests.run.checked_rewards:hangs", "reward.timeout_s=0.5")
    assert reported["reward"] == "failed" and reported["memory"] == "ok" and reported["step"] == "not run"


@pytest.mark.slow
def test_ctrl_c_names_the_running_check(recipe: Path) -> None:
    """Sends Ctrl-C during the check `reward`, after the earlier results were printed."""
    command = ["check", str(recipe), "reward.function=tests.run.checked_rewards:hangs", "reward.timeout_s=600"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "flowrl.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        process_group=0,
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        for output in program.stdout:
            if output.startswith("data "):
                break
        time.sleep(1)  # until the scoring process runs
        os.killpg(program.pid, signal.SIGINT)
        printed = program.stderr.read()
    assert program.returncode == 130 and not missing_facts(printed, "interrupted", "reward")
    assert len(printed.splitlines()) == 1


def test_answers_that_score_like_an_empty_response_are_reported(check: Checked) -> None:
    output = StringIO()
    assert check(f"reward.function={TIED}", output=output)["reward"] == "ok"
    (line,) = (line for line in output.getvalue().splitlines() if line.startswith("reward "))
    assert "higher" in line


@pytest.mark.slow
def test_an_answer_that_is_a_number_is_scored_as_text(check: Checked, recipe: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (recipe.parent / "data/train.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": 19}) + "\n" for row in rows))
    settings = (f"data.train={tmp_path}/rows.jsonl", "data.test=null", "evaluate_every=0", "reward.evaluation=null")
    output = StringIO()
    assert check(*settings, "reward.function=tests.run.checked_rewards:exact_text", output=output)["reward"] == "ok"
    assert len([line for line in output.getvalue().splitlines() if "│ 1 " in line and "│ 0 " in line]) == 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": [19]}) + "\n" for row in rows))
    assert check(*settings, "reward.function=tests.run.checked_rewards:exact_text")["reward"] == "ok"


def test_a_row_that_does_not_fit_is_found(check: Checked, recipe: Path) -> None:
    with rejects(recipe.parent / "data/train.jsonl", 1, "data.max_prompt_tokens", "data.too_long", error=ChecksFailed):
        check("data.max_prompt_tokens=5")


def changed_model(recipe: Path, folder: Path, **settings: object) -> str:
    """Returns an override of the actor's model: a copy with other values in its `config.json`."""
    shutil.copytree(recipe.parent / "data/model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return f"actor.model.path={folder}"


def test_weights_and_tokenizer_that_differ_from_the_config_are_found(
    check: Checked, recipe: Path, tmp_path: Path
) -> None:
    with rejects(tmp_path / "m", "config.json", 15, 12, error=ChecksFailed):
        check(changed_model(recipe, tmp_path / "m", vocab_size=12))
    assert {name for name, state in reported.items() if state == "failed"} == {"models", "tokenizer"}


def test_a_chat_template_that_raises_is_found(check: Checked, recipe: Path, tmp_path: Path) -> None:
    model = changed_model(recipe, tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").write_text("{{ raise_exception('no user role') }}")
    with rejects(tmp_path / "m", "template", "user", error=ChecksFailed):
        check(model)


@pytest.mark.slow
def test_no_step_runs_for_large_models(check: Checked, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.run.checks.model_checks.MAX_STEP_PARAMETERS", 600_000)  # two models of 330,000
    assert check("actor.kl_loss_coef=0.1", function=train)["step"] == "skipped"


def test_a_used_output_folder_is_found(check: Checked, recipe: Path) -> None:
    with rejects(recipe.parent, "output", error=ChecksFailed):
        check(f"output={recipe.parent}")


def test_the_command_locates_problems(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["actor.kl_loss_coef=0.1", "reference.model.path=nowhere/model", "rollout.max_response_tokens=70"]
    assert main(["check", str(recipe), *overrides]) == 2
    printed = capsys.readouterr()
    assert "\nstep " in printed.out and printed.err.startswith("error: reference.model.path=nowhere/model: ")
    text = recipe.read_text()
    broken = recipe.with_name("broken.yaml")
    broken.write_text(text.replace("data/test.jsonl", "data/none.jsonl"))
    try:
        assert main(["check", str(broken)]) == 2
    finally:
        broken.unlink()
    assert not missing_facts(capsys.readouterr().err, f"{broken}:26", "data.test")


@pytest.mark.slow
def test_a_recipe_whose_training_module_cannot_be_imported_fails(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    broken = tmp_path / "broken_recipe"
    broken.mkdir()
    for name, text in (("__init__", ""), ("config", OWN_CONFIG), ("train", "import a_missing_module\n")):
        (broken / f"{name}.py").write_text(text)
    path = tmp_path / "own.yaml"
    path.write_text(recipe.read_text().replace("recipes.grpo.config:GRPOConfig", "broken_recipe.config:OwnConfig"))
    small = ["rollout.max_response_tokens=5"]
    assert main(["check", str(path), *small]) == 2
    assert not missing_facts(capsys.readouterr().err, "broken_recipe.train", "a_missing_module")
    (broken / "train.py").unlink()
    assert main(["check", str(path), *small]) == 0


OWN_CONFIG = """
from recipes.grpo.config import GRPOConfig


class OwnConfig(GRPOConfig):
    pass
"""
