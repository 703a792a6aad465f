"""The pipeline over all stages, with tiny sizes, and in full."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import RunConfig
from recipes.pipeline.config import STAGES, read_settings
from recipes.pipeline.run import main
from tests.errors import missing_facts

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes/pipeline/run_pipeline.sh"
SMALL = ("num_stories=64", "num_pairs=16", "num_held_out=8")
STEPS = {"sft": 2, "reward_model": 1, "ppo": 1, "dpo": 1}
TINY = [
    *SMALL,
    *(f"{stage}.steps={steps}" for stage, steps in STEPS.items()),
    *(f"{stage}.report={{tensorboard: false}}" for stage in STAGES),
    *("ppo.batch_size=8", "ppo.minibatch_size=8", "ppo.ptx.batch_size=4"),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the output folder of a pipeline with tiny sizes."""
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    assert main([*TINY, f"output={folder}"]) == 0
    return folder


@pytest.mark.slow
def test_every_stage_has_a_result(output: Path) -> None:
    summary = json.loads((output / "summary.json").read_text())
    policies = summary["policies"]
    assert list(policies) == ["sft", "ppo", "ppo_without_ptx", "dpo"]
    assert policies["sft"]["win_rate"] is None and policies["sft"]["kl"] == pytest.approx(0, abs=1e-4)
    for row in policies.values():
        assert (row["perplexity"] > 1 and row["win_rate"] is None) or 0 <= row["win_rate"] <= 1
    assert 0 <= summary["reward_model"]["accuracy"] <= 1
    assert set(summary["seconds"]) == {"prepare", "pairs", *STAGES, "comparison"}
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    table = (output / "comparison.md").read_text()
    assert f"{policies['dpo']['perplexity']:.3f}" in table
    for name in ("ppo", "ppo_without_ptx"):
        assert [row["step"] for row in summary["ppo_checkpoints"][name]] == [0, 1]
        assert min(row["perplexity"] for row in summary["ppo_checkpoints"][name]) > 1
    # Step 0 is the SFT model.
    assert summary["ppo_checkpoints"]["ppo"][0]["perplexity"] == policies["sft"]["perplexity"]


@pytest.mark.slow
def test_ptx_is_the_only_difference_of_the_two_ppo_stages(output: Path) -> None:
    with_ptx, without = (
        json.loads((output / "pipeline.json").read_text())[name] for name in ("ppo", "ppo_without_ptx")
    )
    assert with_ptx.pop("ptx") is not None and without.pop("ptx") is None
    assert with_ptx.pop("output") != without.pop("output")
    assert with_ptx == without


@pytest.mark.slow
def test_no_stage_of_training_has_the_hidden_score(output: Path) -> None:
    """The settings name no function, and the files contain only prompts and stories."""
    settings = json.loads((output / "pipeline.json").read_text())
    assert not any(name in json.dumps(settings) for name in ("recipes.pipeline.judge", "judge.py"))
    assert settings["ppo"]["reward"]["function"] is None and settings["ppo"]["reward"]["evaluation"] is None
    rows = [json.loads(line) for line in (output / "pairs/train.jsonl").read_text().splitlines()]
    assert rows and all(set(row) == {"context", "chosen", "rejected"} for row in rows)


@pytest.mark.slow
def test_held_out_prompts_are_not_trained(output: Path) -> None:
    def prompts(name: str) -> set[str]:
        lines = (output / "data" / name).read_text().splitlines()
        return {json.loads(line)["messages"][0]["content"] for line in lines}

    held_out = prompts("prompts_test.jsonl")
    assert held_out == prompts("sft_test.jsonl")
    assert not held_out & (prompts("sft.jsonl") | prompts("prompts.jsonl"))
    assert not prompts("sft.jsonl") & prompts("prompts.jsonl")


@pytest.mark.slow
def test_a_second_start_repeats_only_missing_stages(output: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in output.glob("*/*") if path.is_file()}
    before = json.loads((output / "summary.json").read_text())
    shutil.rmtree(output / "dpo")
    (output / "comparison/dpo.json").unlink()
    assert main([*TINY, f"output={output}"]) == 0
    changed = {path for path, time_ns in files.items() if path.stat().st_mtime_ns != time_ns}
    assert changed == {path for path in files if "dpo" in path.relative_to(output).as_posix()}
    assert json.loads((output / "summary.json").read_text())["policies"] == before["policies"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["num_pairs=0"], ["num_pairs"]),
        (["num_paris=5"], ["num_paris"]),
        (["--output", "x"], ["--output"]),
        (["rm.steps=5"], ["rm"]),
        (["ppo.stepz=5"], ["ppo", "stepz"]),
        (["dpo.steps=many"], ["dpo", "steps"]),
        (["num_pairs=7000", "num_held_out=700"], ["num_pairs", "7700", "7680"]),
    ],
)
def test_invalid_settings_are_rejected_with_one_message(
    words: list[str], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"output={tmp_path / 'run'}", *words]) == 2
    message = capsys.readouterr().err
    assert not missing_facts(message, *facts)
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_files_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    assert main([*TINY, f"output={tmp_path}"]) == 2
    assert not missing_facts(capsys.readouterr().err, tmp_path, "thesis.tex", "output")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_folder_with_other_settings_is_rejected(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"output={output}", "ppo.algorithm.kl_coef=0.5"]) == 2
    assert not missing_facts(capsys.readouterr().err, "ppo.algorithm.kl_coef", "0.5", "output")
    assert main([*TINY, "num_pairs=15", f"output={output}"]) == 2
    assert not missing_facts(capsys.readouterr().err, "num_pairs", "15", "16")


def test_settings_of_ppo_also_hold_without_ptx() -> None:
    _, configs = read_settings(["ppo.steps=7", "ppo_without_ptx.seed=3", "seed=2"])
    assert [configs[name].steps for name in ("ppo", "ppo_without_ptx")] == [7, 7]
    assert [configs[name].seed for name in STAGES] == [2, 2, 2, 3, 2]
    assert all(isinstance(config, RunConfig) for config in configs.values())


def test_the_script_is_short_and_valid() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 5
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_pipeline(tmp_path: Path) -> None:
    """Every stage improves its measure, and ptx lowers the drift."""
    environment = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), f"output={tmp_path}/run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    policies = summary["policies"]
    assert summary["sft"]["validation_loss_after"] < 0.5 * summary["sft"]["validation_loss_before"]
    assert summary["reward_model"]["accuracy"] > 0.6
    for policy in ("ppo", "dpo"):
        assert policies[policy]["win_rate"] - policies[policy]["win_rate_error"] > 0.5
        assert policies[policy]["reward"] > policies["sft"]["reward"]
    assert summary["equal_reward"]["ppo"] < summary["equal_reward"]["ppo_without_ptx"]
