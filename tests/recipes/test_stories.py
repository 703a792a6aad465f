"""A pretrained model of another project runs through every stage; skipped where its folder is absent."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.config import ModelConfig, RolloutConfig
from flowrl.engines.checkpoint.export import export_model
from flowrl.engines.models.loading import load_policy
from flowrl.engines.rollout.base import Request
from flowrl.engines.rollout.hf.engine import HfRollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import grpo_settings

MODEL = Path(__file__).parents[3] / "shared/models/stories260k"
PROMPT = "Once upon a time, there was a little"

pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is absent")


def reward(prompt: str, response: str, **_: object) -> float:
    """Returns the number of spaces."""
    return float(response.count(" "))


def test_a_pretrained_model_continues_a_story():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = load_policy(ModelConfig(path=MODEL))
    rollout = HfRollout(model, tokenizer, RolloutConfig(max_response_tokens=8, temperature=0.01))
    ids = tokenizer(PROMPT)["input_ids"]
    (response,) = rollout.generate([Request("story", ids, key=0)])
    text = tokenizer.decode(ids + response.token_ids, skip_special_tokens=True)
    assert text.strip().startswith(f"{PROMPT} girl named Lily")


@pytest.mark.slow
def test_a_pretrained_model_takes_a_grpo_step_and_is_exported(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"messages": [{"from": "human", "content": PROMPT}]}) + "\n" for _ in range(4))
    )
    settings = grpo_settings(
        actor={"model": {"path": MODEL}, "optimizer": {"lr": 1e-3}},
        model=MODEL,
        output=tmp_path / "run",
        backend="inline",
        threads=1,
        checkpoint={"every": 1},
        reward={"function": f"{__name__}:reward"},
        data={"train": tmp_path / "train.jsonl", "max_prompt_tokens": 64},
    )
    train(GRPOConfig.model_validate(settings))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    export_model(checkpoint / "actor", tmp_path / "exported")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "exported")(PROMPT)["input_ids"]])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    reloaded = load_policy(ModelConfig(path=tmp_path / "exported"))
    assert torch.equal(reloaded(ids).logits, exported(ids).logits)
    assert not torch.equal(reloaded(ids).logits, load_policy(ModelConfig(path=MODEL))(ids).logits)
