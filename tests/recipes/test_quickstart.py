"""The first command of the README, end to end: real Ray, a real model, and an accuracy that rises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.cli import main
from flowrl.report.page.write_report import write_report

pytestmark = pytest.mark.timeout(2000)  # a minute on an idle machine, several minutes on a busy one

# The short form that recipes/quickstart/ppo.yaml names.
SHORT = ("steps=20",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the short form with seed 0; returns the run folder."""
    output = tmp_path_factory.mktemp("quickstart")
    environment = Path(sys.prefix)
    command = ["bash", "recipes/quickstart/run_quickstart.sh", *SHORT]
    variables = {"OUTPUT": str(output), "SEED": "0", "VIRTUAL_ENV": str(environment), "HOME": str(Path.home())}
    path = f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        command, env=variables | {"PATH": path}, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output / "seed0" / "ppo"


def test_ppo_raises_held_out_accuracy_by_a_tenth(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation_rows"] >= 1000
    assert 0.2 <= summary["accuracy_before"] <= 0.35
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.10
    assert summary["peak_memory_mb"] < 4000


def test_the_run_folder_has_every_result(run: Path) -> None:
    files = {path.name for path in run.iterdir()}
    assert files >= {"config.yaml", "metrics.jsonl", "summary.json", "trace.json", "tensorboard", "model"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(21))
    calls = {event["name"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert calls >= {"generate", "score", "logprobs", "values", "update", "apply"}


def test_the_report_has_every_part(run: Path, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    parts = {"head", "curves-0", "timeline-0", "rows-0", "tokens-0"}
    assert set(re.findall(r'id="data-([\w-]+)"', page)) == parts


def test_the_commands_for_checkpoints_work_without_another_setting(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(run)]) == 0
    assert "20" in capsys.readouterr().out
    assert main(["export", str(run), "--step", "20", "--output", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").is_file()


def test_transformers_generates_with_the_trained_model(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "37+58"}], return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        # The Auto classes of transformers are not typed with `generate`.
        ids = model.generate(**prompt, max_new_tokens=5, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    answer = ids[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]).lstrip("-").isdigit()
