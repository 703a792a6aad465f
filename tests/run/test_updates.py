"""The number of updates that a run announces, and warnings about its learning rates."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.report.progress import result_table
from flowrl.run.results import metric_titles
from flowrl.run.updates import ZeroRateWatch, describe_batches, describe_planned_updates, describe_updates
from recipes.dpo.config import DPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import ppo_settings
from tests.errors import missing_facts

SFT: dict[str, Any] = {
    "output": "out",
    "batch_size": 2,
    "steps": 10,
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
}


def trained(optimizer: dict[str, Any]) -> dict[str, Any]:
    return {"actor": {"model": {"path": "model"}, "optimizer": optimizer}}


def sft(**optimizer: Any) -> SFTConfig:
    return SFTConfig.model_validate(SFT | trained({"lr": 1e-4, "schedule": "linear"} | optimizer))


def test_the_number_and_the_sizes_of_updates_are_described() -> None:
    sizes = {"steps": 5, "batch_size": 256, "minibatch_size": 100, "samples_per_prompt": 1, "ppo_epochs": 2}
    (line,) = describe_updates(PPOConfig.model_validate(ppo_settings(**sizes)))
    assert not missing_facts(line, 30, 5, 100, 56, 2)
    assert len(describe_updates(sft())) == 1


def test_one_minibatch_is_singular() -> None:
    (line,) = describe_updates(PPOConfig.model_validate(ppo_settings(batch_size=8, minibatch_size=8)))
    assert not missing_facts(line, "minibatch", 8)


def test_scores_of_a_reward_model_are_no_accuracy() -> None:
    model = {"model": {"path": "rm"}}
    scored = PPOConfig.model_validate(ppo_settings(reward=model))
    table = result_table({"accuracy": 4.0}, {"accuracy": 5.0}, metric_titles(scored))
    assert str(next(iter(table.columns[0].cells))) == "held-out reward"
    assert metric_titles(PPOConfig.model_validate(ppo_settings())) == {}
    judged = ppo_settings(reward=model | {"evaluation": "rewards:exact"})
    assert metric_titles(PPOConfig.model_validate(judged)) == {}


def test_a_plan_counts_the_updates_of_epochs(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 10
    (tmp_path / "train.json").write_text(json.dumps(rows))

    def line(**changes: Any) -> str:
        data = {"train": tmp_path / "train.json", "max_prompt_tokens": 8} | changes.pop("data", {})
        settings = SFT | trained({"lr": 1e-4}) | {"epochs": 3, "steps": 0, "batch_size": 4, "data": data} | changes
        (text,) = describe_planned_updates(SFTConfig.model_validate(settings))
        return text

    assert ": 9 = 3 epochs x 3 batches of up to 4 (10 rows" in line()
    assert ": 7 = 3 epochs x 3 batches" in line(steps=7) and "steps (7)" in line(steps=7)
    assert "at most 9" in line(data={"too_long": "drop"})
    assert "epochs (3)" in line(data={"train": "org/dataset"})


def test_a_pair_counts_as_two_rows_of_kto(tmp_path: Path) -> None:
    pair = {"context": [{"from": "human", "content": "1"}], "chosen": "2", "rejected": "3"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    data = {"train": tmp_path / "pairs.jsonl", "max_prompt_tokens": 8}
    for loss, num_updates in (("dpo", 1), ("kto", 2)):
        actor = {"model": {"path": "model"}, "optimizer": {"lr": 1e-4}, "loss": loss}
        settings = {"output": "out", "batch_size": 1, "epochs": 1, "data": data, "actor": actor}
        (line,) = describe_planned_updates(DPOConfig.model_validate(settings))
        assert f"{num_updates} = 1 epoch" in line


def test_batch_sizes_are_described_for_all_ranks_and_for_one() -> None:
    sizes = {"batch_size": 64, "minibatch_size": 16, "samples_per_prompt": 8}
    step, rank = describe_batches(PPOConfig.model_validate(ppo_settings(**sizes)), num_ranks=4)
    for fact in ("8 prompts x 8 samples_per_prompt = 64 sequences", "= 4 x 16 (minibatch_size)"):
        assert fact in step
    assert not missing_facts(rank, "4", "16", "16384") and "16 sequences per step, 4 per optimizer update" in rank
    uneven = PPOConfig.model_validate(ppo_settings(**sizes | {"minibatch_size": 10}))
    step, rank = describe_batches(uneven, num_ranks=4)
    assert "7 of up to 10" in step and "2 or 3 per optimizer update" in rank
    assert describe_batches(sft(), num_ranks=1) == []


@pytest.mark.parametrize(
    ("optimizer", "facts"),
    [
        ({"total_steps": 4}, ("actor.optimizer.total_steps", 4, 10, 6)),
        ({"warmup_steps": 20}, ("actor.optimizer.warmup_steps", 20, 10)),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_reported_once(optimizer: dict[str, int], facts: tuple) -> None:
    _, warning = describe_updates(sft(**optimizer))
    assert not missing_facts(warning, *facts)


def reports(config: SFTConfig, *rates: float) -> list[str]:
    messages: list[str] = []
    watch = ZeroRateWatch(config, messages.append)
    for step, rate in enumerate(rates, start=1):
        watch.check_step(step, {"lr": rate, "loss": 0.0})
    return messages


def test_a_learning_rate_of_zero_is_reported_once_with_its_step() -> None:
    (warning,) = reports(sft(), 0.5, 0.0, 0.0)
    assert not missing_facts(warning, "lr", 2, "optimizer.total_steps")


def test_a_learning_rate_of_zero_that_the_start_announced_is_not_reported_again() -> None:
    assert reports(sft(total_steps=1), 0.5, 0.0) == []


def test_the_number_of_updates_is_a_limit_if_epochs_may_end_the_run() -> None:
    optimizer = {"lr": 1e-4, "schedule": "linear", "total_steps": 4}
    config = SFTConfig.model_validate(SFT | {"epochs": 1} | trained(optimizer))
    (line,) = describe_updates(config)
    assert "at most 10" in line
    assert len(reports(config, 0.5, 0.0, 0.0)) == 1
