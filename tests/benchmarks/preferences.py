"""Compares the losses of the first steps of DPO, KTO and a reward model with TRL 1.16.

python -m tests.benchmarks.preferences [--stages dpo kto reward_model]

Both sides train the same random Qwen2 models in float32 with the same pairs, in the same order: AdamW with lr 1e-3, 16
pairs (KTO: 16 responses) per step. The benchmark installs TRL into an environment in `--trl-env` (1.5 GB).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from recipes.dpo.config import DPOConfig
from recipes.dpo.train import train as train_policy
from recipes.quickstart.pairs import make_pair
from recipes.quickstart.prepare import CHARACTERS, SPECIAL, save_tokenizer
from recipes.quickstart.task import deal
from recipes.reward_model.config import RewardModelRunConfig
from recipes.reward_model.train import train as train_reward_model
from tests.benchmarks.measure import read_arguments
from tests.benchmarks.step import GRPO_VERSION, TRL_ENVIRONMENTS, has_trl, trl_python

ROOT = Path(__file__).parents[2]
STAGES = ("dpo", "kto", "reward_model")
ROWS, STEPS, LIMIT = 16, 5, 1e-4


def write_inputs(folder: Path) -> None:
    """Writes a policy, a model with a scalar head, their tokenizer, and the pairs in both formats."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    scorer: dict[str, Any] = settings | {"num_labels": 1}
    models = {
        "policy": Qwen2ForCausalLM(Qwen2Config(**settings)),
        "scorer": Qwen2ForSequenceClassification(Qwen2Config(**scorer)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    generator = random.Random(0)
    pairs = [make_pair(problem, generator) for problem in deal(0).prompts[: ROWS * STEPS]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    # The chat template of the quickstart adds "=" to a question. TRL adds the end token to a response.
    texts = [
        {"prompt": f"{pair['context'][0]['content']}="}
        | {name: pair[name][0]["content"] for name in ("chosen", "rejected")}
        for pair in pairs
    ]
    (folder / "pairs.json").write_text(json.dumps(texts))
    (folder / "answers.json").write_text(json.dumps(_label_responses(texts)))


def _label_responses(pairs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Returns labeled responses. Those of one prompt are in the same step, but not adjacent."""
    steps = [pairs[start : start + ROWS // 2] for start in range(0, len(pairs), ROWS // 2)]
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for step in steps
        for name in ("chosen", "rejected")
        for pair in step
    ]


def _write_responses(folder: Path) -> Path:
    """Writes the labeled responses for flowrl, whose chat template adds the "=" to a question."""
    answers = json.loads((folder / "answers.json").read_text())
    lines = [json.dumps(row | {"prompt": row["prompt"].removesuffix("=")}) + "\n" for row in answers]
    (folder / "answers.jsonl").write_text("".join(lines))
    return folder / "answers.jsonl"


def flowrl_losses(folder: Path, stage: str) -> list[float]:
    role, name = ("reward", "scorer") if stage == "reward_model" else ("actor", "policy")
    trained: dict[str, Any] = {"model": {"path": folder / name}, "optimizer": {"lr": 1e-3}}
    trained |= {"head": "from_model"} if stage == "reward_model" else {"loss": {"kind": stage, "beta": 0.1}}
    settings = {
        "output": folder / f"flowrl-{stage}",
        "backend": "inline",
        "threads": 1,
        "steps": STEPS,
        "batch_size": ROWS,
        role: trained,
        "data": {
            "train": _write_responses(folder) if stage == "kto" else folder / "pairs.jsonl",
            "max_prompt_tokens": 16,
            "order": "file",
        },
        "report": {"tensorboard": False},
    }
    if stage == "reward_model":
        train_reward_model(RewardModelRunConfig.model_validate(settings))
    else:
        train_policy(DPOConfig.model_validate(settings))
    lines = (folder / f"flowrl-{stage}" / "metrics.jsonl").read_text().splitlines()
    return [record[f"{role}/loss"] for record in map(json.loads, lines) if record["step"]]


def trl_losses(python: Path, folder: Path, stage: str) -> list[float]:
    script = Path(__file__).with_name("trl_preferences.py")
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, script, stage, folder, str(ROWS)],
        cwd=ROOT,
        env={**os.environ, **offline, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["losses"][:STEPS]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the first losses of preference training with TRL.")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--trl-env", type=Path, default=TRL_ENVIRONMENTS, help="folder for the environment of TRL")
    options = read_arguments(parser, stages=["dpo"])
    if options.smoke and not has_trl(options.trl_env, GRPO_VERSION):
        sys.stdout.write(f"skipped: TRL is not installed in {options.trl_env}; without --smoke, it is installed\n")
        return 0
    python = trl_python(options.trl_env, GRPO_VERSION)
    is_equal = True
    sys.stdout.write(
        "| stage | " + " | ".join(f"step {step}" for step in range(1, STEPS + 1)) + " | largest difference |\n"
    )
    sys.stdout.write("|---|" + "---|" * (STEPS + 1) + "\n")
    for stage in options.stages:
        with tempfile.TemporaryDirectory(prefix="preferences-") as name:
            write_inputs(Path(name))
            ours, theirs = flowrl_losses(Path(name), stage), trl_losses(python, Path(name), stage)
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        is_equal = is_equal and difference <= LIMIT
        cells = " | ".join(f"{a:.6f} / {b:.6f}" for a, b in zip(ours, theirs, strict=True))
        sys.stdout.write(f"| {stage} | {cells} | {difference:.1e} |\n")
        sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
