"""Trains with TRL, one step per turn. `tests.benchmarks.step` runs this file in the environment of a TRL version.

python trl_steps.py {grpo,ppo} FOLDER SOCKET STEPS [--num-generations N] [--no-gc]

FOLDER has the models, the tokenizer and the prompts that `tests.benchmarks.step` has written.
"""

import argparse
import gc
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] (the environment of TRL)
from reward_functions import RESPONSE, score  # pyright: ignore[reportMissingImports] (this folder is on the path)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from turns import TurnClient  # pyright: ignore[reportMissingImports] (this folder is on the path)

ROWS = 32


class Stepping(TrainerCallback):
    """Ends a turn after each step. A step is everything between two calls: generation, forward passes, update."""

    def __init__(self, turns: TurnClient) -> None:
        self._turns = turns

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._turns.wait()


def shared_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings that GRPO and PPO share: float32 on the CPU, one update of all rows, and no output."""
    return {
        "output_dir": str(folder / "trl"),
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def train_grpo(
    folder: Path, prompts: list[str], tokenizer: PreTrainedTokenizerBase, turns: TurnClient, steps: int, samples: int
) -> None:
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415 (loaded for GRPO only)  # pyright: ignore[reportMissingImports]

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        assert all(len(ids) == RESPONSE for ids in completion_ids)
        return list(map(score, completions))

    config = GRPOConfig(
        **shared_settings(folder),
        max_steps=steps,
        num_generations=samples,
        max_completion_length=RESPONSE,
        top_k=0,
        top_p=1.0,
        beta=0.04,
        loss_type="bnpo",
        use_bias_correction_kl=False,
    )
    trainer = GRPOTrainer(
        # A path, from which TRL also loads the reference.
        model=str(folder / "policy"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Stepping(turns)],
    )
    trainer.train()


def train_ppo(
    folder: Path, prompts: list[str], tokenizer: PreTrainedTokenizerBase, turns: TurnClient, steps: int
) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: PLC0415 (1.16 has no PPO)  # pyright: ignore[reportMissingImports]

    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "scorer")
    config = PPOConfig(
        **shared_settings(folder),
        total_episodes=ROWS * steps,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=ROWS,
        response_length=RESPONSE,
        stop_token=None,
        num_sample_generations=0,
        kl_coef=0.05,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=deepcopy(policy),
        reward_model=scorer,
        value_model=deepcopy(scorer),
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer.encode(prompt) for prompt in prompts]}),
        callbacks=[Stepping(turns)],
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=["grpo", "ppo"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("socket")
    parser.add_argument("steps", type=int)
    parser.add_argument("--num-generations", type=int, default=1)
    parser.add_argument("--no-gc", action="store_true", help="replaces gc.collect by a function that does nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.no_gc:
        gc.collect = lambda *_: 0
    lines = (arguments.folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["messages"][0]["content"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / "policy", padding_side="left")
    turns = TurnClient(arguments.socket)
    if arguments.algorithm == "grpo":
        train_grpo(arguments.folder, prompts, tokenizer, turns, arguments.steps, arguments.num_generations)
    else:
        train_ppo(arguments.folder, prompts, tokenizer, turns, arguments.steps)


if __name__ == "__main__":
    main()
