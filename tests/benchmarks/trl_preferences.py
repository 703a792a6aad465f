"""Trains with TRL on preferences, and prints the loss of each step. `tests.benchmarks.preferences` runs this file in
the environment of TRL.

python trl_preferences.py {dpo,kto,reward_model} FOLDER ROWS

FOLDER has the models, the tokenizer, `pairs.json` and `answers.json`. Rows are used in their order, with ROWS per step.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] (the environment of TRL)
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (  # pyright: ignore[reportMissingImports]
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward_model": (RewardTrainer, RewardConfig),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=TRAINERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer_class, config_class = TRAINERS[options.stage]

    class Trainer(trainer_class):
        """Uses the rows in their order."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    settings: dict[str, Any] = {
        "output_dir": str(options.folder / "trl"),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": options.rows,
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_length": None,
        "seed": 0,
    }
    if options.stage != "reward_model":
        settings["beta"] = 0.1
    rows = json.loads((options.folder / "pairs.json").read_text())
    if options.stage == "kto":
        answers = json.loads((options.folder / "answers.json").read_text())
        # TRL combines a prompt with the response of the previous row, and flowrl with that of the next row.
        steps = [answers[start : start + options.rows] for start in range(0, len(answers), options.rows)]
        rows = [row for step in steps for row in reversed(step)]
    auto = AutoModelForSequenceClassification if options.stage == "reward_model" else AutoModelForCausalLM
    folder = options.folder / ("scorer" if options.stage == "reward_model" else "policy")
    model = auto.from_pretrained(folder, dtype=torch.float32)
    models: dict[str, Any] = {"model": model}
    if options.stage != "reward_model":
        models["ref_model"] = auto.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = Trainer(
        **models, args=config_class(**settings), train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"losses": losses}))  # noqa: T201 (read by the parent process)


if __name__ == "__main__":
    main()
