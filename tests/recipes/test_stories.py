"""A pretrained model passes through every stage: SFT, reward model, DPO, GRPO, export and generation.

The model is stories260K of https://github.com/karpathy/llama2.c, in the format of transformers. The folder of the model
contains its license.
"""

import importlib.util
import json
import random
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl import Cluster, Placement
from flowrl.cli import main
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.engines.models.loading import load_policy
from flowrl.engines.rollout.base import Request
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.workers import Rollout
from recipes.dpo.config import DPOConfig
from recipes.dpo.train import train as train_dpo
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.pipeline.stories import DEFECTS, Prompt, all_prompts, tell_with
from recipes.reward_model.config import RewardModelRunConfig
from recipes.reward_model.train import train as train_reward_model
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import NO_REPORT
from tests.engines import vllm_checks
from tests.engines.closeness import reduction_rtol, relative_error
from tests.errors import missing_facts

MODEL = Path(__file__).parent / "stories260k"
NUM_PROMPTS, NUM_HELD_OUT = 128, 8
STEPS = {"sft": 20, "reward_model": 6, "dpo": 4, "grpo": 4}
RTOL = reduction_rtol(torch.float32, length=172, depth=5 * 7)
"""Bound for a float32 pass: five layers of seven products of at most 172 terms."""

PUBLISHED_STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so"
)
"""The most likely tokens after the beginning-of-sequence token, from test_all.py of llama2.c."""


pytestmark = pytest.mark.timeout(900)  # of the shared run, on a busy machine


@dataclass(frozen=True)
class Stages:
    """The outputs of all stages."""

    folder: Path
    """Has a run folder per stage, the exported model, and the generated stories."""
    prompts: list[Prompt]
    """Held-out prompts."""
    summaries: dict[str, Any]
    """Stage -> summary of its run."""

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name / "model.safetensors")

    def stories(self) -> list[str]:
        rows = (self.folder / "generated.jsonl").read_text().splitlines()
        return [json.loads(row)["response"] for row in rows]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Runs all stages: SFT on good stories, a reward model and DPO on pairs, and GRPO with the reward model."""
    folder = tmp_path_factory.mktemp("stages")
    prompts = all_prompts(0)[: NUM_PROMPTS + NUM_HELD_OUT]
    write_data(folder, prompts)
    summaries = {}

    def settings(stage: str, data: str, role: str, model: Path, lr: float, **changes: Any) -> dict[str, Any]:
        return {
            "output": folder / stage,
            "backend": "inline",
            "threads": 1,
            "steps": STEPS[stage],
            "batch_size": 8,
            role: {"model": {"path": model}, "optimizer": {"lr": lr}},
            "data": {
                "train": folder / f"{data}.jsonl",
                "test": folder / f"{data}_test.jsonl",
                "max_prompt_tokens": 256,
            },
            "report": NO_REPORT,
        } | changes

    sft = folder / "sft/model"
    summaries["sft"] = train_sft(SFTConfig.model_validate(settings("sft", "stories", "actor", MODEL, 2e-3)))
    reward_model = settings("reward_model", "pairs", "reward", sft, 1e-3)
    summaries["reward_model"] = train_reward_model(RewardModelRunConfig.model_validate(reward_model))
    dpo = settings("dpo", "pairs", "actor", sft, 5e-4)
    summaries["dpo"] = train_dpo(DPOConfig.model_validate(dpo))
    grpo = settings(
        "grpo",
        "prompts",
        "actor",
        sft,
        5e-4,
        batch_size=32,
        minibatch_size=32,
        samples_per_prompt=8,
        algorithm={"estimator": "grpo"},
        reward={"model": {"path": folder / "reward_model/model"}},
        rollout={"max_response_tokens": 72},
        checkpoint={"every": STEPS["grpo"]},
    )
    grpo["actor"]["kl_loss_coef"] = 0.05
    summaries["grpo"] = train_grpo(GRPOConfig.model_validate(grpo))

    exported = str(folder / "exported")
    assert main(["export", str(folder / "grpo"), "--step", str(STEPS["grpo"]), "--output", exported]) == 0
    arguments = ["--prompts", str(folder / "prompts_test.jsonl"), "--output", str(folder / "generated.jsonl")]
    assert main(["generate", exported, *arguments, "--temperature", "0", "--max-tokens", "72"]) == 0
    return Stages(folder, prompts[NUM_PROMPTS:], summaries)


def write_data(folder: Path, prompts: list[Prompt]) -> None:
    """Writes good stories, pairs of a good story and a story with all defects, and prompts."""
    generator = random.Random(0)

    def story(prompt: Prompt, *defects: str) -> dict[str, str]:
        return {"role": "assistant", "content": tell_with(prompt, set(defects), generator)}

    rows: dict[str, list[Any]] = {"stories": [], "pairs": [], "prompts": []}
    for prompt in prompts:
        user = {"role": "user", "content": f"{prompt.text} "}
        rows["stories"].append({"messages": [user, story(prompt)]})
        rows["pairs"].append({"context": [user], "chosen": [story(prompt)], "rejected": [story(prompt, *DEFECTS)]})
        rows["prompts"].append({"messages": [user]})
    for name, lines in rows.items():
        text = [json.dumps(line) + "\n" for line in lines]
        (folder / f"{name}.jsonl").write_text("".join(text[:NUM_PROMPTS]))
        (folder / f"{name}_test.jsonl").write_text("".join(text[NUM_PROMPTS:]))


def loss_of(texts: list[str]) -> float:
    """Returns the mean loss per token under the pretrained model, averaged over the texts."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    inputs = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    with torch.no_grad():
        return sum(model(ids, labels=ids).loss.item() for ids in inputs) / len(texts)


def test_the_most_likely_story_is_the_published_one() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rollout = HfRollout(load_policy(ModelConfig(path=MODEL)), tokenizer, RolloutConfig(max_response_tokens=199))
    (response,) = rollout.generate([Request("story", [tokenizer.bos_token_id], key=0, temperature=0.0)])
    assert tokenizer.decode(response.token_ids) == PUBLISHED_STORY


@pytest.mark.parametrize("text", ["One day, Lily saw a ball.", " two  spaces\n", "Héllo, 你好 😀\t"])
def test_encoded_text_is_decoded_to_itself(text: str) -> None:
    """The vocabulary has few characters. All others are encoded as their bytes."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_sft_lowers_the_loss_of_held_out_stories(stages: Stages) -> None:
    summary = stages.summaries["sft"]
    assert 0.1 < summary["validation_loss_after"] < summary["validation_loss_before"] / 2


def test_the_reward_model_prefers_held_out_stories_without_defects(stages: Stages) -> None:
    summary = stages.summaries["reward_model"]
    assert summary["accuracy_after"] == 1
    assert summary["evaluation/margin_after"] > summary["evaluation/margin_before"] + 2
    assert summary["validation_loss_after"] < summary["validation_loss_before"] / 2


def test_dpo_raises_the_margin_of_held_out_pairs(stages: Stages) -> None:
    summary = stages.summaries["dpo"]
    assert summary["evaluation/margin_before"] == pytest.approx(0, abs=1e-4)
    assert summary["evaluation/margin_after"] > 0.5
    assert summary["validation_loss_after"] < 0.6 < summary["validation_loss_before"]


def test_grpo_raises_the_score_of_the_reward_model(stages: Stages) -> None:
    summary = stages.summaries["grpo"]
    assert summary["accuracy_after"] > summary["accuracy_before"] + 2


def test_the_exported_weights_are_those_of_the_trainer(stages: Stages) -> None:
    exported, trained, start = (stages.weights(name) for name in ("exported", "grpo/model", "sft/model"))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(weight, trained[name]) for name, weight in exported.items())
    assert all(not torch.equal(weight, start[name]) for name, weight in exported.items())


def test_transformers_computes_the_same_logits_with_the_exported_model(stages: Stages) -> None:
    ids = torch.tensor([AutoTokenizer.from_pretrained(stages.folder / "exported").encode(PUBLISHED_STORY)])
    assert ids.tolist() == [AutoTokenizer.from_pretrained(MODEL).encode(PUBLISHED_STORY)]
    model = AutoModelForCausalLM.from_pretrained(stages.folder / "exported")
    assert torch.equal(model(ids).logits, load_policy(ModelConfig(path=stages.folder / "exported"))(ids).logits)


def test_generated_stories_are_sensible(stages: Stages) -> None:
    """They name the hero, and are likely under the pretrained model, unlike the same words in random order."""
    generated = stages.stories()
    assert all(prompt.name in story for prompt, story in zip(stages.prompts, generated, strict=True))
    shuffled = [" ".join(random.Random(0).sample(story.split(), len(story.split()))) for story in generated]
    assert loss_of(generated) < 2.5 < 4 < loss_of(shuffled)


def save_with_wide_heads(folder: Path) -> Path:
    """Saves a copy of the model whose heads have size 32 instead of 8, for vLLM on a CPU, and returns its folder.

    Rotary pair i of a head has the frequency 10000^(-2i/8), which is that of pair 4i with size 32. Its numbers move
    from i and i + 4 to 4i and 4i + 16. All others are zero. Queries are doubled, because scores are divided by the
    square root of the size.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    config = deepcopy(model.config)
    config.head_dim = 32
    indices = [4 * i + 16 * half for half in range(2) for i in range(4)]
    weights = model.state_dict()
    for name, weight in weights.items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            wide_HID = torch.zeros(len(weight) // 8, 32, config.hidden_size)
            wide_HID[:, indices] = weight.unflatten(0, (-1, 8)) * (2 if part == "q_proj" else 1)
            weights[name] = wide_HID.flatten(0, 1)
        elif part == "o_proj":
            wide_DHI = torch.zeros(config.hidden_size, config.num_attention_heads, 32)
            wide_DHI[..., indices] = weight.unflatten(1, (-1, 8))
            weights[name] = wide_DHI.flatten(1, 2)
    wide = AutoModelForCausalLM.from_config(config)
    wide.load_state_dict(weights)
    wide.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder)
    return folder


@pytest.mark.parametrize("command", ["plan", "check"])
def test_the_narrow_heads_are_rejected_before_vllm_starts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[2] / "recipes/grpo/arithmetic.yaml")
    assert main([command, config, f"actor.model.path={MODEL}", "rollout.engine=vllm"]) == 2
    problem = next(line for line in capsys.readouterr().err.splitlines() if "rollout.engine" in line)
    assert not missing_facts(problem, "vllm", "cpu", 8, 32, 512, MODEL)


def test_wide_heads_have_equal_logits(tmp_path: Path) -> None:
    ids = torch.tensor([AutoTokenizer.from_pretrained(MODEL).encode(PUBLISHED_STORY)])
    wide, model = (AutoModelForCausalLM.from_pretrained(path) for path in (save_with_wide_heads(tmp_path), MODEL))
    with torch.no_grad():
        assert relative_error(wide(ids).logits, model(ids).logits) < RTOL


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_has_the_log_probabilities_of_transformers(ray_session: None, tmp_path: Path) -> None:
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    config = RolloutConfig(engine="vllm", max_response_tokens=64)
    path = ModelConfig(path=save_with_wide_heads(tmp_path / "wide"))
    prompts = [AutoTokenizer.from_pretrained(MODEL).encode(text) for text in ("Once upon a time", "One day, Tom")]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        rollout = cluster.group("rollout", Rollout, config, path, seed=0)
        (responses,) = rollout.run(vllm_checks.generate, prompts, [0, 1])
    for prompt, tokens, logprobs in zip(prompts, responses["tokens"], responses["logprobs"], strict=True):
        with torch.no_grad():
            logits_LV = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits_LV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert relative_error(torch.tensor(logprobs), expected) < RTOL
