"""The estimates in docs/parallelism.md are those of `flowrl plan --time`."""

import re
from pathlib import Path

import pytest

from flowrl.cli import main
from tests.slow_cases import as_parameters

ROOT = Path(__file__).parents[2]

LORA = [
    "actor.lora={rank: 32}",
    "actor.model.dtype=bfloat16",
    "actor.optimizer.kind=adamw",
    "actor.engine.max_tokens_per_microbatch=16384",
]
QWEN = ["recipes/grpo/qwen32b.yaml", "--devices", "8"]
LLAMA = ["recipes/grpo/llama70b.yaml", "--devices", "8,8"]
MOE = ["recipes/moe/qwen30b_a3b.yaml", "--devices", "8"]
DIVIDED = [f"{role}.engine.expert_parallel=true" for role in ("actor", "reference")]
FSDP = [f"placement.roles.{role}=main" for role in ("actor", "reference")]
FSDP += ["actor.engine.shard_ranks=16", "reference.engine.shard_ranks=16"]

RUNS = {
    "Qwen2.5-32B, 8 x H100 | as in the file: fsdp": QWEN,
    "Qwen2.5-32B, 8 x H100 | LoRA": [*QWEN, *LORA],
    "Qwen3-30B-A3B, 8 x H100 | as in the file: fsdp": MOE,
    "Qwen3-30B-A3B, 8 x H100 | expert parallelism": [*MOE, *DIVIDED],
    "Llama-3.3-70B, 16 x H100 | as in the file: a pipeline stage per node": LLAMA,
    "Llama-3.3-70B, 16 x H100 | fsdp over both nodes": [*LLAMA, *FSDP],
    "Llama-3.3-70B, 16 x H100 | fsdp over both nodes, LoRA": [*LLAMA, *FSDP, *LORA],
}
"""First two cells of a row, joined -> arguments of `flowrl plan`."""


def documented() -> dict[str, tuple[str, str]]:
    """Returns the first two cells, joined, and the estimates of each row of the table of examples."""
    text = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+ x H100) \| ([^|]+) \| ([\d.]+ GB) \| (\d+ s, \d+ %) \|$", text, re.MULTILINE)
    return {f"{model} | {setting}": (peak, step) for model, setting, peak, step in rows}


def test_each_example_is_documented() -> None:
    assert documented().keys() == RUNS.keys()


@pytest.mark.parametrize("row", as_parameters(RUNS, *(row for row in RUNS if "LoRA" not in row)))
def test_the_documented_estimate_is_that_of_the_command(
    row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", *RUNS[row], "--gpu", "h100", "--time"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    peak = max(float(words[-1]) for words in lines if words[:3] == ["all", "of", "80.0"])
    *_, seconds, mfu = next(words for words in lines if words[:1] == ["step"])
    assert documented()[row] == (f"{peak:.1f} GB", f"{float(seconds):.0f} s, {mfu.rstrip('%')} %")
