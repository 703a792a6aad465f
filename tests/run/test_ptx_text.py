"""Text of PTX: its batches, their saved position, and their effect on a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowrl import Cluster
from flowrl.algorithms import ptx_weights
from flowrl.config import ConfigError
from flowrl.config.placement import SINGLE
from flowrl.controller.errors import WorkerError
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.run.checks.check_list import check_start
from flowrl.run.datasets import PtxText
from flowrl.workers import PTX, Actor
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from tests.configs import quickstart_settings
from tests.errors import rejects

ROWS = 10
"""Number of sequences in the file of text."""


def config(task: Path, output: Path, ptx: dict[str, Any] | None = None, **changes: Any) -> GRPOConfig:
    sizes = {"batch_size": 8, "minibatch_size": 4, "samples_per_prompt": 2, "steps": 4}
    settings = quickstart_settings(task, output, **sizes, algorithm={"estimator": "grpo"})
    settings["reward"] = {"function": "recipes.quickstart.task:score"}
    settings["report"] = {"tensorboard": False, "rollouts": None}
    if ptx is not None:
        text = output.parent / "text.jsonl"
        text.write_text("\n".join((task / "sft.jsonl").read_text().split("\n")[:ROWS]) + "\n")
        settings["ptx"] = {"data": text, "coef": 0.5, "batch_size": 4, "max_tokens": 16} | ptx
    return GRPOConfig.model_validate(settings | changes)


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    ids, lengths = batch.get("input_ids"), batch.lengths().tolist()
    return [tuple(row.tolist()) for row in ids.split(lengths)]


def test_every_pass_has_all_text_in_a_new_order_and_continues_at_a_saved_position(task: Path, tmp_path: Path) -> None:
    settings = config(task, tmp_path / "run", {})
    text = PtxText(settings)
    first, second = ([next(text) for _ in range(3)] for _ in range(2))
    assert [len(batch) for batch in first] == [4, 4, 2] and len(text) == ROWS
    seen = [[row for batch in batches for row in rows_of(batch)] for batches in (first, second)]
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]

    again = PtxText(settings)
    for _ in range(4):
        next(again)
    resumed = PtxText(settings)
    resumed.restore(json.loads(json.dumps(again.state())))
    assert rows_of(next(resumed)) == rows_of(second[1])


def test_a_position_in_other_text_is_rejected(task: Path, tmp_path: Path) -> None:
    state = PtxText(config(task, tmp_path / "run", {})).state()
    for name, other in (
        ("seed", config(task, tmp_path / "run", {}, seed=1)),
        ("batch_size", config(task, tmp_path / "run", {"batch_size": 5})),
    ):
        with rejects("ptx", name, error=DataError):
            PtxText(other).restore(state)


def test_without_ptx_there_is_no_text_and_the_update_has_weight_one(task: Path, tmp_path: Path) -> None:
    text = PtxText(config(task, tmp_path / "run"))
    assert not text and text.policy_weight == 1.0
    with Cluster(SINGLE, backend="inline", roles=("actor",), num_threads=1) as cluster:
        actor = cluster.group("actor", Actor, config(task, tmp_path / "run").actor)
        assert text.add_gradient(actor, PTX) == {}
        with rejects("optim_step", "forward_backward", error=WorkerError):
            actor.optim_step().get()


def test_the_gradient_of_the_next_batch_is_added_with_the_weight_of_the_text(task: Path, tmp_path: Path) -> None:
    settings = config(task, tmp_path / "run", {"coef": 0.5})
    text, batch = PtxText(settings), next(PtxText(settings))

    def gradient(add: Callable[[Any], Any]) -> tuple[float, float]:
        with Cluster(SINGLE, backend="inline", roles=("actor",), num_threads=1) as cluster:
            actor = cluster.group("actor", Actor, settings.actor)
            loss = add(actor).get()["actor/ptx/loss"].result()
            return loss, actor.optim_step().get()["actor/grad_norm"].result()

    weighted_loss, weighted_norm = gradient(lambda actor: text.add_gradient(actor, PTX))
    loss, norm = gradient(lambda actor: actor.forward_backward(batch, PTX))
    assert (weighted_loss, weighted_norm) == (loss, pytest.approx(0.5 * norm, rel=1e-5))


@pytest.mark.parametrize("form", ["add", "mix"])
def test_the_weights_are_those_of_the_form(form: Any, task: Path, tmp_path: Path) -> None:
    text = PtxText(config(task, tmp_path / "run", {"form": form}))
    assert (text.policy_weight, text.weight) == ptx_weights(coef=0.5, form=form)


def records(settings: GRPOConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (settings.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_lowers_the_loss_of_its_text_and_resumes_bitwise_identically(task: Path, tmp_path: Path) -> None:
    straight = config(task, tmp_path / "straight", {})
    train(straight)
    losses = [record["actor/ptx/loss"] for record in records(straight) if record["step"]]
    assert len(losses) == 4 and losses[-1] < losses[0]

    # Two updates per step draw two batches of text.
    begun = config(task, tmp_path / "begun", {}, steps=2, checkpoint={"every": 1})
    train(begun)
    again = begun.model_copy(update={"steps": 4, "resume": "auto"})
    train(again)
    assert [record["actor/ptx/loss"] for record in records(again) if record["step"]] == losses
    weights = [load_file(folder.output / "model" / "model.safetensors") for folder in (straight, again)]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


@pytest.mark.slow
def test_a_weight_of_zero_changes_no_weight_of_the_policy(task: Path, tmp_path: Path) -> None:
    without, zero = config(task, tmp_path / "a"), config(task, tmp_path / "b", {"coef": 0.0})
    for settings in (without, zero):
        train(settings)
    weights = [load_file(folder.output / "model" / "model.safetensors") for folder in (without, zero)]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_missing_and_overlong_text_is_rejected_before_the_run_starts(task: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    with rejects("ptx.data", missing, error=ConfigError):
        check_start(config(task, tmp_path / "run", {"data": missing}))
    with rejects("ptx.max_tokens", "100000", error=ConfigError):
        check_start(config(task, tmp_path / "run", {"max_tokens": 100_000}))
    with rejects("line", "1", "ptx.max_tokens", error=DataError):
        PtxText(config(task, tmp_path / "run", {"max_tokens": 2}))


def test_the_text_may_be_plain_text_in_several_files(task: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    paths[0].write_text(json.dumps({"source": "1+1", "Target": "=2"}) + "\n")
    paths[1].write_text(json.dumps({"text": "3"}) + "\n")
    files = [{"path": paths[0]}, {"path": paths[1], "weight": 2}]
    settings = config(task, tmp_path / "run", {"data": files, "batch_size": 3})
    assert settings.ptx is not None and list(settings.ptx.files("ptx").values()) == paths
    text = PtxText(settings)
    batch = next(text)
    assert len(text) == len(batch) == 3
    texts = ChatTokenizer(settings.actor.model.path)
    ids, masks = (batch.get(name).split(batch.lengths().tolist()) for name in ("input_ids", "response_mask"))
    rows = sorted(
        (texts.decode_all(row.tolist()), texts.decode_all(row[m].tolist())) for row, m in zip(ids, masks, strict=True)
    )
    # The first token of a row is not predicted.
    assert rows == [("1+1=2<eos>", "=2<eos>"), ("3<eos>", "<eos>"), ("3<eos>", "<eos>")]


def test_the_loss_of_text_is_the_mean_over_all_tokens_but_the_first(task: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps([{"source": "", "Target": "12+34"}, {"source": "", "Target": "5"}]))
    batch = next(PtxText(config(task, tmp_path / "run", {"data": tmp_path / "texts.json"})))
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    losses = []
    for row in batch.get("input_ids").split(batch.lengths().tolist()):
        with torch.no_grad():
            losses.append((model(row[None], labels=row[None]).loss.item(), len(row) - 1))
    expected = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    settings = config(task, tmp_path / "actor", {})
    with Cluster(SINGLE, backend="inline", roles=("actor",), num_threads=1) as cluster:
        measured = cluster.group("actor", Actor, settings.actor).measure(batch, PTX).get()
    assert measured["actor/ptx/loss"].result() == pytest.approx(expected, rel=1e-5)
