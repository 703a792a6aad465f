"""The Python and YAML examples of docs/schedules.md, trace.md, metrics.md and generated_text.md run."""

import json
import re
from pathlib import Path

import pytest
import yaml

from flowrl.cli import main
from flowrl.config import OnPolicyConfig, Placement, ReportConfig, RolloutLogConfig, load
from flowrl.report.rollout_log import COLUMNS, TOKEN_VALUES, RolloutLog
from flowrl.schedules.schedule_plan import render_graph
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings, plan_run

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str, language: str) -> list[str]:
    """Returns the code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


@pytest.mark.parametrize("page", ["schedules.md", "trace.md"])
def test_python_examples_run(page: str) -> None:
    for code in examples(page, "python"):
        exec(compile(code, page, "exec"), {})


def test_the_metrics_example_reads_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"step": step, "reward": step / 10, "kl": None} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    (code,) = examples("metrics.md", "python")
    scope: dict = {"output": tmp_path}
    exec(compile(code, "metrics.md", "exec"), scope)
    assert scope["rewards"] == {0: 0.0, 1: 0.1, 2: 0.2}


def test_the_page_of_generated_text_shows_the_output_of_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = (json.loads(text) for text in examples("generated_text.md", "json"))
    (tmp_path / "runs/grpo").mkdir(parents=True)
    RolloutLog(tmp_path / "runs/grpo/rollouts", RolloutLogConfig()).write("training", row["step"], [row])
    monkeypatch.chdir(tmp_path)
    command, expected = examples("generated_text.md", "")[0].split("\n", 1)
    assert main(command.removeprefix("$ flowrl ").split()) == 0
    assert capsys.readouterr().out == expected
    for code in examples("generated_text.md", "python"):
        exec(compile(code, "generated_text.md", "exec"), {})
        assert capsys.readouterr().out.strip() == code.rstrip().rpartition("# ")[2]


def test_the_page_of_generated_text_shows_all_columns_and_defaults() -> None:
    sections = re.split(r"^## ", (DOCS / "generated_text.md").read_text(), flags=re.M)
    for name, expected in (("Format", COLUMNS), ("Tokens", TOKEN_VALUES)):
        (section,) = (text for text in sections if text.startswith(name))
        assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", section, re.M)) == expected
    assert list(json.loads(examples("generated_text.md", "json")[0])) == list(COLUMNS)
    settings = yaml.safe_load(examples("generated_text.md", "yaml")[0])["report"]
    assert ReportConfig.model_validate(settings) == ReportConfig()


def test_yaml_examples_are_valid_settings() -> None:
    schedule = yaml.safe_load(examples("schedules.md", "yaml")[0])["schedule"]
    assert OnPolicyConfig.model_validate(grpo_settings(schedule=schedule)).schedule.kind == "async"
    report = yaml.safe_load(examples("metrics.md", "yaml")[0])["report"]
    assert ReportConfig.model_validate(report) == ReportConfig(tensorboard=False, rollouts=None)
    report = yaml.safe_load(examples("metrics.md", "yaml")[-1])["report"]
    assert [tracker.kind for tracker in ReportConfig.model_validate(report).trackers] == ["wandb", "trackio"]


def test_the_documented_graph_is_the_output_of_plan() -> None:
    placement = load(DOCS.parent / "placement/detached_2m2t.yaml", ["device=cpu"], Placement)
    changes = {"batch_size": 512, "samples_per_prompt": 8, "schedule": {"kind": "async"}, "placement": placement}
    config = GRPOConfig.model_validate(grpo_settings(**changes))
    assert render_graph(config, plan_run(config)) in (DOCS / "schedules.md").read_text()
