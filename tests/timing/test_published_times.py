"""The estimates in docs/step_time.md are those of `flowrl plan --time` for the configurations of published times."""

import json
import re
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]

QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "max_position_embeddings": 262144,
}
MODELS = {
    "qwen3-4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "llama3-8b": {
        "model_type": "llama",
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
}
"""Name -> `config.json` of a model."""

GRPO = "recipes/grpo/qwen1.5b.yaml --devices 1 --gpu h100 --prompt-tokens 200 batch_size=512 minibatch_size=512"
GRPO += " actor.kl_loss_coef=0.001 algorithm.correction=null placement.roles.reference=main"
GRPO += " actor.engine.gradient_checkpointing=false actor.engine.max_tokens_per_microbatch=8192"
FULL = "recipes/sft/qwen0.5b.yaml --devices 8 --gpu h200 actor.model.path={qwen3-4b} batch_size=8"
FULL += " actor.engine.strategy=fsdp"
LORA = "recipes/sft/qwen0.5b.yaml --devices 1 --gpu h100 actor.model.path={qwen3-4b} actor.lora.rank=16 batch_size=1"
TITAN = "recipes/sft/qwen0.5b.yaml --devices 8 --gpu h100 actor.model.path={llama3-8b} batch_size=16"
TITAN += " actor.engine.strategy=fsdp actor.engine.gradient_checkpointing=false placement.memory_gb=200"
SKYRL = "recipes/grpo/qwen7b.yaml --devices 8 --gpu h100 actor.model.path={qwen3-8b} data.max_prompt_tokens=2048"
SKYRL += " reference.model.path={qwen3-8b} rollout.max_response_tokens=8192 batch_size=256 samples_per_prompt=8"
SKYRL += " minibatch_size=256 actor.kl_loss_coef=0 --prompt-tokens 512"

RUNS = {
    "GRPO, 1.5B, 512 x 1,024 tokens, 1 x H100": GRPO,
    "full, 4B, 16k tokens, 8 x H200": f"{FULL} data.max_prompt_tokens=16384",
    "full, 4B, 64k tokens, 8 x H200": f"{FULL} data.max_prompt_tokens=65536",
    "LoRA, 4B, 16k tokens, 1 x H100": f"{LORA} data.max_prompt_tokens=16384",
    "LoRA, 4B, 64k tokens, 1 x H100": f"{LORA} data.max_prompt_tokens=65536",
    "full, 8B, 2 x 8k tokens, 8 x H100": f"{TITAN} data.max_prompt_tokens=8192",
    "DAPO, 9B, 256 x 8,192 tokens, 8 x H100": SKYRL,
    "DAPO, 9B, 256 x 4,096 tokens, 8 x H100": f"{SKYRL} --response-tokens 4096",
}
"""First cell of a row -> arguments of `flowrl plan`."""


def documented() -> dict[str, str]:
    """Returns the first cell and the estimate of each row of the table of published times."""
    text = (ROOT / "docs/step_time.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([^|]+ x H[12]00) \|[^|]+\| ([\d.]+ s, \d+ %) \|", text, re.MULTILINE))


def test_each_published_time_has_an_estimate() -> None:
    assert documented().keys() == RUNS.keys()


@pytest.mark.parametrize("row", RUNS)
def test_the_documented_estimate_is_that_of_the_command(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for name, settings in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    arguments = RUNS[row].format_map({name: tmp_path / name for name in MODELS}).split()
    assert main(["plan", *arguments, "--time"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    *_, seconds, mfu = line.split()
    assert f"{seconds} s, {mfu.rstrip('%')} %" == documented()[row]
