"""`flowrl check` finds problems before a run starts, and leaves nothing behind."""

import gzip
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

import pyarrow
import pytest
from pyarrow import parquet
from rich.console import Console

from flowrl.cli import main
from flowrl.config import load
from flowrl.data.reading.reader import read_conversations
from flowrl.run.check import NAMES, ChecksFailed, check_config, small_config
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.errors import missing_facts, rejects
from tests.run import checked_rewards
from tests.small_task import prepare_small

RECIPE = """
recipe: recipes.grpo.config:GRPOConfig
output: {folder}/run
placement: {{device: cpu, pools: {{main: [2]}}, roles: {{actor: main, rollout: main, reference: main, reward: main}}}}
steps: 100
threads: 1
evaluate_every: 10
batch_size: 64
minibatch_size: 16
samples_per_prompt: 4
actor:
  model: {{path: {folder}/data/model}}
  optimizer: {{lr: 0.001}}
  engine: {{strategy: fsdp}}
reference:
  model: {{path: {folder}/data/model}}
reward:
  function: recipes.quickstart.task:score
  evaluation: recipes.quickstart.task:exact
rollout:
  max_response_tokens: 5
algorithm:
  estimator: grpo
data:
  train: {folder}/data/train.jsonl
  test: {folder}/data/test.jsonl
  max_prompt_tokens: 6
"""

TIED = "tests.run.checked_rewards:always_one"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    prepare_small(folder / "data")
    for name in ("train", "test"):
        path = folder / f"data/{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


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
            states = {cells[0]: cells[1] for cells in rows if cells[0] in NAMES}
            reported.update(states)
        return states

    yield run
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_valid_config_passes_all_checks(check: Checked) -> None:
    output = StringIO()
    assert check(output=output, function=train) == dict.fromkeys(NAMES, "ok")
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
        cwd=Path(__file__).parents[2],
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
    monkeypatch.setattr("flowrl.run.check.MAX_STEP_PARAMETERS", 600_000)  # two models of 330,000
    assert check("actor.kl_loss_coef=0.1", function=train)["step"] == "skipped"


def test_a_used_output_folder_is_found(check: Checked, recipe: Path) -> None:
    with rejects(recipe.parent, "output", error=ChecksFailed):
        check(f"output={recipe.parent}")


def test_the_small_step_uses_few_rows_and_one_process(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, ["schedule.kind=one_step_off", "rollout.max_response_tokens=4000"], GRPOConfig)
    small = small_config(config, tmp_path)
    assert (small.steps, small.backend, small.output.parent) == (1, "inline", tmp_path)
    assert isinstance(small, GRPOConfig) and small.batch_size == 8 and small.rollout.max_response_tokens < 100
    (copy,) = small.data.training_files
    assert len(copy.source.read_text().splitlines()) == 8 and small.data.test is None
    assert small.actor.engine.strategy == "auto" and small.actor.optimizer == config.actor.optimizer


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json", "rows.parquet", "row.json", "folder"])
def test_the_small_step_reads_the_first_rows_of_any_format(recipe: Path, tmp_path: Path, name: str) -> None:
    train = load(recipe, [], GRPOConfig).data.training_files[0].source
    rows, path = [json.loads(line) for line in train.read_text().splitlines()], tmp_path / name
    match name:
        case "rows.jsonl.gz":
            path.write_bytes(gzip.compress(train.read_bytes()))
        case "rows.json":
            path.write_text(json.dumps(rows, indent=2))
        case "row.json":
            path.write_text(json.dumps(rows[0], indent=2))
        case "rows.parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case "folder":
            path.mkdir()
            shutil.copy(train, path)
    small = small_config(load(recipe, [f"data.train={path}"], GRPOConfig), tmp_path)
    assert isinstance(small, GRPOConfig)
    (copy,) = small.data.training_files
    expected = [row.messages for row in read_conversations(path)][:8]
    assert [row.messages for row in read_conversations(copy)] == expected


@pytest.mark.slow
def test_the_small_step_uses_generated_rows(recipe: Path, tmp_path: Path) -> None:
    settings = ["data.train=[{reasoning_gym: {chain_sum: 1}, rows: 20, seed: 3}]"]
    small = small_config(load(recipe, settings, GRPOConfig), tmp_path)
    assert isinstance(small, GRPOConfig)
    (copy,) = small.data.training_files
    assert [row.columns["task"] for row in read_conversations(copy, kind="prompts")] == ["chain_sum"] * 8


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
