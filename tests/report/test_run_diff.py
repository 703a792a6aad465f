"""Two small runs are compared: equal runs, other settings, other data, and a change in one call."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrl.cli import main
from flowrl.config import UserError
from flowrl.report.run_diff import (
    STAGES,
    CommonScores,
    Divergence,
    RunDiff,
    compare_runs,
    is_nondeterministic,
    print_diff,
)
from tests.errors import missing_facts
from tests.run.conftest import config, task
from tests.run.echo_run import EchoConfig, train

__all__ = ["config", "task"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with two equal runs, `a` and `b`, written by hand: three steps with saved rows."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        run = folder / name
        (run / "rollouts").mkdir(parents=True)
        (run / "config.yaml").write_text(f"output: {run}\nsteps: 3\nactor: {{optimizer: {{lr: 0.1}}}}\n")
        (run / "system.json").write_text(json.dumps({"versions": {"torch": "2.13.0"}, "machine": {}}))
        (run / "inputs.json").write_text(json.dumps({"data.train": {"size": 10, "crc32": 7}}))
        records = [
            {"step": step, "reward": 0.25 * step, "actor/loss": 0.5, "kl": None, "seconds": 1.0 if name == "a" else 2.0}
            for step in range(4)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        row = {
            "step": 2, "kind": "training", "row": 0, "prompt_id": 4, "prompt": "1+1=", "response": "2", "score": 1.0,
            "rewards": {"task": 1.0}, "tokens": {"ids": [5, 6], "logprobs": [-0.5, -0.25]},
        }  # fmt: skip
        (run / "rollouts/training-000002.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def pair(runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    return shutil.copytree(runs / "a", tmp_path / "a"), shutil.copytree(runs / "b", tmp_path / "b")


def edit(path: Path, change: Callable[[dict[str, Any]], None], line: int = 0) -> None:
    """Changes a line of a JSON-lines file."""
    lines = path.read_text().splitlines()
    value = json.loads(lines[line])
    change(value)
    lines[line] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def test_equal_runs_differ_in_their_folder_and_times_only(pair: tuple[Path, Path]) -> None:
    diff = compare_runs(*pair)
    assert diff.is_equal and not diff.missing
    assert (diff.num_steps, diff.num_equal_steps) == (3, 3)


def test_settings_inputs_and_versions_are_compared(pair: tuple[Path, Path]) -> None:
    first, second = pair
    (second / "config.yaml").write_text("output: x\nsteps: 4\nactor: {optimizer: {lr: 0.1}}\nseed: 1\n")
    (second / "system.json").write_text(json.dumps({"versions": {"torch": "2.11.0", "vllm": "0.32"}, "machine": {}}))
    (second / "inputs.json").write_text(json.dumps({"data.train": {"size": 10, "crc32": 8}}))
    diff = compare_runs(first, second)
    assert diff.settings == [("steps", "3", "4"), ("seed", None, "1")]
    assert diff.versions == [("torch", "2.13.0", "2.11.0"), ("vllm", None, "0.32")]
    assert [name for name, *_ in diff.inputs] == ["data.train"] and not diff.is_equal


@pytest.mark.parametrize(
    ("change", "call", "name"),
    [
        (lambda row: row.update(prompt="1+2="), "the order of prompts", "prompt"),
        (lambda row: row.update(response="3", score=0.0), "rollout.generate", "response"),
        (lambda row: row["tokens"].update(ids=[5, 7]), "rollout.generate", "ids of token 1"),
        (lambda row: row["rewards"].update(task=0.5), "reward.score", "rewards"),
        (lambda row: row["tokens"].update(logprobs=[-0.5, -0.2501]), "actor.logprobs", "logprobs of token 1"),
    ],
)
def test_saved_rows_name_the_first_call_that_diverges(
    pair: tuple[Path, Path], change: Callable[[dict[str, Any]], None], call: str, name: str
) -> None:
    """The update of the same step differs too, as a consequence."""
    first, second = pair
    edit(second / "rollouts/training-000002.jsonl", change)
    edit(second / "metrics.jsonl", lambda record: record.update({"actor/loss": 0.75}), line=2)
    divergence = compare_runs(first, second).divergence
    assert divergence is not None and (divergence.step, divergence.call) == (2, call)
    assert name in divergence.values[0][0]


def test_metrics_name_the_first_call_without_saved_rows(pair: tuple[Path, Path]) -> None:
    first, second = pair
    edit(second / "metrics.jsonl", lambda record: record.update({"actor/loss": 0.75}), line=1)
    edit(second / "metrics.jsonl", lambda record: record.update({"reward": 9.0, "actor/loss": 0.75}), line=3)
    diff = compare_runs(first, second)
    assert diff.divergence is not None
    assert (diff.divergence.step, diff.divergence.call) == (1, "actor.update")
    assert diff.divergence.values == [("actor/loss", 0.5, 0.75)]
    assert diff.num_equal_steps == 1
    assert [name for name, *_ in diff.results] == ["reward", "actor/loss"]


def test_runs_that_saved_different_rows_are_compared_by_their_common_rows(pair: tuple[Path, Path]) -> None:
    first, second = pair
    path = second / "rollouts/training-000002.jsonl"
    row = json.loads(path.read_text())
    path.write_text("".join(json.dumps(line) + "\n" for line in (row | {"row": 5, "prompt_id": 9}, row)))
    assert compare_runs(first, second).is_equal


def test_a_tolerance_ignores_rounding(pair: tuple[Path, Path]) -> None:
    first, second = pair
    edit(second / "metrics.jsonl", lambda record: record.update({"actor/loss": 0.5 + 1e-7}), line=1)
    assert compare_runs(first, second).divergence is not None
    assert compare_runs(first, second, tolerance=1e-6).is_equal


def test_a_value_that_is_not_a_number_differs_from_a_number(pair: tuple[Path, Path]) -> None:
    first, second = pair
    edit(second / "metrics.jsonl", lambda record: record.update({"kl": 0.0}), line=3)
    divergence = compare_runs(first, second).divergence
    assert divergence is not None and divergence.call == "reference.logprobs"
    assert math.isnan(divergence.values[0][1]) and divergence.values[0][2] == 0.0


PLACEHOLDERS = {"<role>": "actor", "<k>": "2", "<reason>": "stale", "...": "gap", "(`_low`, `_high`)": ""}


def documented_metrics() -> list[str]:
    """Returns the names of all metrics of docs/metrics.md, with values instead of placeholders."""
    text = (ROOT / "docs/metrics.md").read_text()
    tables = text[text.index("## Rewards and responses") : text.index("## Warning signs")]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell) if not name.startswith("_")]
    for placeholder, value in PLACEHOLDERS.items():
        names = [name.replace(placeholder, value) for name in names]
    return names


def test_each_documented_metric_belongs_to_one_call_or_differs_in_equal_runs() -> None:
    names = documented_metrics()
    assert len(names) > 80
    counts = {name: sum(stage.determines(name) for stage in STAGES) for name in names}
    assert {name for name, count in counts.items() if count > 1} == set()
    without_call = {name for name, count in counts.items() if count == 0}
    assert {name for name in without_call if not is_nondeterministic(name)} == set()


@pytest.mark.parametrize(
    ("line", "changes", "call"),
    [
        (1, {"repetition": 0.5, "actor/loss": 0.75}, "rollout.generate"),
        (1, {"dropped_failed": 1, "kl": 0.5}, "the selection of groups"),
        (1, {"weights_compared": 7, "reward": 9.0}, "the weight transfer"),
        (0, {"accuracy_pass@4": 0.5, "agreement": 0.5}, "the evaluation"),
        (0, {"accuracy_source/sums/NAME": 0.5}, "the evaluation"),
    ],
)
def test_the_first_call_with_different_metrics_is_named(
    pair: tuple[Path, Path], line: int, changes: dict[str, float], call: str
) -> None:
    first, second = pair
    edit(second / "metrics.jsonl", lambda record: record.update(changes), line=line)
    divergence = compare_runs(first, second).divergence
    assert divergence is not None and (divergence.step, divergence.call) == (line, call)


def test_results_with_a_missing_metric_are_last(pair: tuple[Path, Path]) -> None:
    first, second = pair
    lines = (second / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    (second / "metrics.jsonl").write_text(
        "\n".join([*lines[:-1], json.dumps(last | {"reward": 9.0, "accuracy": 1.0})]) + "\n"
    )
    assert [name for name, *_ in compare_runs(first, second).results] == ["reward", "accuracy"]


def test_evaluations_with_failed_rewards_are_compared_by_the_common_scores(pair: tuple[Path, Path]) -> None:
    """Row 1 has no score in the first run, and row 2 none in the second. Only the first run has row 4."""
    scores = ([1.0, None, 0.5, 0.0, 0.25], [0.0, 1.0, None, 0.5])
    for folder, own in zip(pair, scores, strict=True):
        rows = [
            {
                "step": 2, "kind": "evaluation", "row": i, "set": "hard", "prompt_id": i, "prompt": "p", "sample": 0,
                "response": "2", "score": score, "reward_failures": {"reward": "crashed"} if score is None else {},
            }
            for i, score in enumerate(own)
        ]  # fmt: skip
        path = folder / "rollouts/evaluation-000002.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (compared,) = compare_runs(*pair).evaluations
    assert compared == CommonScores(2, "hard", num_rows=4, num_scored=2, means=(0.5, 0.25))
    console = Console(file=StringIO(), width=200)
    print_diff(compare_runs(*pair), console)
    assert isinstance(console.file, StringIO)
    (line,) = [line for line in console.file.getvalue().splitlines() if "hard" in line and "rewards failed" in line]
    assert not missing_facts(line, 2, 4, "0.500", "0.250")


def test_what_cannot_be_compared_is_stated(pair: tuple[Path, Path]) -> None:
    first, second = pair
    (second / "system.json").unlink()
    (second / "metrics.jsonl").unlink()
    assert compare_runs(first, second).missing.keys() == {"versions", "metrics"}


def test_real_runs_are_equal_or_diverge(config: Callable[..., EchoConfig], tmp_path: Path) -> None:
    data = config().data
    reversed_file = tmp_path / "reversed.jsonl"
    reversed_file.write_text("\n".join(reversed(Path(str(data.train)).read_text().splitlines())) + "\n")
    other_data = data.model_copy(update={"train": reversed_file})
    runs = [config(output=tmp_path / name, data=own) for name, own in (("a", data), ("b", data), ("c", other_data))]
    for settings in runs:
        train(settings)
    first, second, other = (settings.output for settings in runs)
    assert compare_runs(first, second).is_equal
    diff = compare_runs(first, other)
    assert [name for name, *_ in diff.settings] == ["data.train"] == [name for name, *_ in diff.inputs]
    assert diff.divergence is not None and diff.divergence.call == "the order of prompts"


def test_the_command_prints_the_divergence_and_sets_its_exit_code(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = map(str, pair)
    assert main(["diff", first, second, "--exit-code"]) == 0
    edit(pair[1] / "metrics.jsonl", lambda record: record.update({"actor/loss": 0.75}), line=1)
    assert main(["diff", first, second]) == 0
    assert main(["diff", first, second, "--exit-code"]) == 1
    output = capsys.readouterr().out
    assert "step 1, actor.update" in output and "actor/loss" in output


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_a_folder_without_a_run_is_rejected(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=name):
        compare_runs(pair[0], tmp_path / name)
    assert main(["diff", str(tmp_path / name), str(pair[0])]) == 2


def test_the_command_does_not_load_torch() -> None:
    code = "import sys, flowrl.report.run_diff; print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# Tables.


def printed_cells(first: Any, second: Any) -> list[str]:  # Any: values of JSON
    """Returns the printed values of a metric that differs."""
    entries = [("reward", first, second)]
    diff = RunDiff(("a", "b"), divergence=Divergence(1, "actor.update", entries), num_steps=1, results=entries)
    console = Console(file=StringIO(), width=200)
    print_diff(diff, console)
    assert isinstance(console.file, StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "reward" in line)
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


@pytest.mark.parametrize(
    ("first", "second", "cells"),
    [
        (0.1 + 0.2, 0.7000000000000001, ["0.3", "0.7"]),
        (1 / 3, 2 / 3, ["0.3333", "0.6667"]),
        (0.123451, 0.123452, ["0.123451", "0.123452"]),
        (0.3, 0.1 + 0.2, ["0.3", "0.30000000000000004"]),
        (1.0, 1 + 2**-52, ["1.0", "1.0000000000000002"]),
        (1.2345678e-7, 2e-7, ["1.235e-07", "2e-07"]),
        (20481.25, 20999.75, ["20481.0", "21000.0"]),
        (1234567.0, 1234568.0, ["1234567.0", "1234568.0"]),
        (123456789, 123456780, ["123456789", "123456780"]),
        (1 / 3, None, ["0.3333", "none"]),
        (float("nan"), 1 / 3, ["NaN", "0.3333"]),
        (float("inf"), 1 / 3, ["Infinity", "0.3333"]),
        (1, 1 + 1e-9, ["1", "1.000000001"]),
        ("0.30000000000000004", "0.1", ["0.30000000000000004", "0.1"]),
        ({"a": 1 / 3, "b": 1 / 7}, {"a": 1 / 3, "b": 1 / 7 + 1e-7}, ['{"a": 0.3333, "b": 0.1428571}', None]),
        ([1 / 3, 0.5], [1 / 7], ["[0.3333, 0.5]", "[0.1429]"]),
    ],
)
def test_numbers_have_the_digits_that_distinguish_the_runs(first: Any, second: Any, cells: list[str | None]) -> None:
    shown = printed_cells(first, second)
    assert shown[0] == cells[0] and cells[1] in (shown[1], None)
    assert shown[0] != shown[1]
