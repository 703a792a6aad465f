"""`flowrl generate`, `chat` and `eval` with vLLM give the greedy responses of engine hf."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800), needs_vllm]

ENGINES = ("hf", "vllm")
GREEDY = ("--temperature", "0", "--max-tokens", "6")
PROMPTS = ("12+34=", "7-5=", "80+19=")


def run(engine: str, command: str, *arguments: str | Path, **options: Any) -> str:
    """Runs a command in a process of its own, and returns its standard output."""
    memory = () if engine == "hf" or command == "eval" else ("--kv-cache-gb", "0.1")
    done = subprocess.run(
        [sys.executable, "-m", "flowrl.cli", command, *map(str, arguments), "--engine", engine, *memory],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_adapter_generates(task_folder: Path, lora_folder: Path, tmp_path: Path) -> None:
    adapter, prompts = tmp_path / "adapter", tmp_path / "prompts.txt"
    assert main(["export", str(lora_folder), "--adapter", "--output", str(adapter)]) == 0
    prompts.write_text("\n".join(PROMPTS))
    options = ("--adapter", adapter, "--prompts", prompts, *GREEDY)
    rows = [
        [json.loads(line) for line in run(engine, "generate", task_folder / "model", *options).splitlines()]
        for engine in ENGINES
    ]
    assert [row["prompt"] for row in rows[0]] == list(PROMPTS)
    for name in ("response", "finish_reason", "response_tokens"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    assert [row["logprob"] for row in rows[1]] == pytest.approx([row["logprob"] for row in rows[0]], abs=1e-3)


@pytest.mark.parametrize("size", ["--tp", "--pp"])
def test_two_devices_generate_the_responses_of_one(size: str, task_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    options = ("--prompts", prompts, *GREEDY)
    expected, rows = (
        [json.loads(line) for line in run("vllm", "generate", task_folder / "model", *options, *sizes).splitlines()]
        for sizes in ((), (size, "2"))
    )
    assert [row["response"] for row in rows] == [row["response"] for row in expected]


def test_a_chat_keeps_its_history(run_folder: Path) -> None:
    lines = "\n".join(("12+34=", "7-5="))
    outputs = [run(engine, "chat", run_folder, *GREEDY, input=lines) for engine in ENGINES]
    assert outputs[0] == outputs[1] and outputs[0].strip()


def test_an_evaluation_has_the_same_scores(task_folder: Path, tmp_path: Path) -> None:
    task = ("--task", task_folder / "test.jsonl", "--reward", "recipes.quickstart.task:score", "--limit", "8")
    settings = ("rollout.max_response_tokens=6", "rollout.vllm.kv_cache_gb=0.1")
    saved = []
    for engine in ENGINES:
        output = tmp_path / f"{engine}.json"
        run(engine, "eval", task_folder / "model", *task, "--output", output, *settings[: 1 + (engine == "vllm")])
        saved.append(json.loads(output.read_text()))
    assert saved[0]["prompts"] == saved[1]["prompts"]
    assert saved[1]["settings"][0]["rollout"]["engine"] == "vllm"
