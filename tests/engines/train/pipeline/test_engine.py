"""Stages load only their layers, and together they compute what one process computes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoConfig, OlmoForCausalLM, PreTrainedModel

from flowrl.config import ActorConfig, EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, UserError
from flowrl.engines.parallel.sharding import EngineError
from flowrl.engines.train.base import TrainContext
from flowrl.engines.train.fsdp.outputs import PolicyModel
from flowrl.engines.train.pipeline.engine import PipelineEngine
from flowrl.engines.train.pipeline.stage_model import cut_model
from flowrl.engines.train.pipeline.stage_schedule import (
    StageCost,
    bubble,
    finish_times,
    num_in_flight,
    one_forward_one_backward,
)
from tests.engines.closeness import assert_norm_close
from tests.engines.families import build
from tests.engines.tiny import SIZES, qwen2, save
from tests.engines.train.pipeline.stage_ranks import (
    ADAPTERS,
    LOSSES,
    NUM_LAYERS,
    adapter_results,
    main,
    results,
    start,
)
from tests.errors import rejects
from tests.processes import run_ranks

RTOL = 1e-9
KINDS = [*LOSSES, *ADAPTERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, copies of it for two stages, and their results."""
    folder = tmp_path_factory.mktemp("stages")
    model = qwen2(num_hidden_layers=NUM_LAYERS, initializer_range=0.1)
    weights = load_file(save(model, folder / "model") / "model.safetensors")
    for stage, others in enumerate((("layers.2.", "layers.3.", "model.norm."), ("layers.0.", "layers.1."))):
        own = {n: w * torch.nan if any(other in n for other in others) else w for n, w in weights.items()}
        save_file(own, save(model, folder / f"stage {stage}") / "model.safetensors", {"format": "pt"})
    run_ranks(main, (folder,), 2)
    return folder


@pytest.fixture(scope="module")
def stages(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    alone: dict[str, dict[str, Any]] = {kind: results(kind, start(kind, folder / "model")) for kind in LOSSES}
    return alone | {
        name: adapter_results(start("policy", folder / "model", lora=lora)) for name, lora in ADAPTERS.items()
    }


def test_a_weight_that_a_stage_reads_is_checked(folder: Path) -> None:
    with pytest.raises(UserError, match="NaN"):
        start("policy", folder / "stage 0")


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_train_the_weights_of_one_process(stages: list, expected: dict, kind: str) -> None:
    for stage in stages:
        assert_norm_close(stage[kind]["weights"], expected[kind]["weights"], RTOL)
        steps, alone = ([step["grad_norm"] for step in each[kind]["steps"]] for each in (stage, expected))
        assert steps == pytest.approx(alone, rel=RTOL)
    assert stages[1][kind]["measured"] == pytest.approx(expected[kind]["measured"], rel=RTOL)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_stage_exports_the_adapter_of_all_stages(stages: list, expected: dict, kind: str) -> None:
    for stage in stages:
        assert list(stage[kind]["exported"]) == list(expected[kind]["exported"])
        assert_norm_close(stage[kind]["exported"], expected[kind]["exported"], RTOL)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_in_the_last_stage_and_zeros_in_the_first(stages: list, expected: dict, kind: str) -> None:
    first, last, alone = stages[0][kind]["before"], stages[1][kind]["before"], expected[kind]["before"]
    assert_norm_close(last, {name: value for name, value in alone.items() if name in last}, RTOL)
    assert first.keys() == last.keys() == alone.keys()
    for name, value in first.items():
        assert (value.shape, value.dtype) == (last[name].shape, last[name].dtype) and not value.any()


@pytest.mark.parametrize("kind", LOSSES)
def test_stages_hold_their_layers_and_a_tied_head_both(stages: list, expected: dict, kind: str) -> None:
    embeddings = 32 * 64 if kind == "policy" else 0
    held = [stage[kind]["held"] for stage in stages]
    assert sum(held) == expected[kind]["held"] + embeddings
    # The stages differ by the embeddings of the first one, and the norm and head of the last one.
    assert abs(held[0] - held[1]) <= 32 * 64 + 2 * 64 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_facts_about_the_model_are_those_of_all_stages(stages: list, expected: dict, kind: str) -> None:
    for stage in stages:
        for name in ("files", "architecture", "num_embeddings"):
            assert stage[kind][name] == expected[kind][name]
    used = [stage[kind]["usage"] for stage in stages]
    assert {name: used[0][name] + used[1][name] for name in used[0]} == pytest.approx(expected[kind]["usage"])


def test_stages_are_idle_for_the_bubble(stages: list) -> None:
    """Both stages have two layers, whose backward pass costs twice their forward pass."""
    orders = [stage["passes"] for stage in stages]
    num_micros = len(orders[0]) // 2
    assert num_micros > 4 and len(orders[1]) == len(orders[0])
    cost = StageCost(1, 2)
    end = max(max(times.values()) for times in finish_times(orders, [cost, cost]))
    assert 1 - num_micros * 3 / end == pytest.approx(bubble(2, num_micros))


def test_a_stage_keeps_the_activations_of_the_micro_batches_in_flight(stages: list) -> None:
    """Bytes of saved tensors, of steps of one and of eight equal micro-batches."""
    for stage in range(2):
        assert stages[stage]["passes"] == one_forward_one_backward(stage, 2, len(stages[stage]["passes"]) // 2)
        one, eight = stages[stage]["saved"]
        assert one > 0 and eight == num_in_flight(stage, 2, 8) * one


def olmo() -> PreTrainedModel:
    return OlmoForCausalLM(OlmoConfig(hidden_size=32, **SIZES))


@pytest.mark.parametrize("create", [partial(build, "GPT-2"), partial(build, "OPT"), olmo], ids=["gpt2", "opt", "olmo"])
def test_a_model_of_another_family_is_rejected(create: Callable[[], PreTrainedModel]) -> None:
    with rejects("pp", 2, "qwen2", "remove", error=EngineError):
        cut_model(PolicyModel(create()), 0, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": EngineConfig(strategy="fsdp", expert_parallel=True)},
        {"lora": LoraConfig(rank=2, base_quantization="int8")},
    ],
)
def test_settings_without_stages_are_rejected(settings: dict[str, Any]) -> None:
    config = ActorConfig(model=ModelConfig(path=Path("model")), optimizer=OptimizerConfig(lr=1.0), **settings)
    with rejects("pp", "remove", error=EngineError):
        PipelineEngine.start(TrainContext("policy", config, torch.device("cpu"), None, pp=2))


def test_more_stages_than_layers_are_rejected() -> None:
    with rejects("pp", 2, 3, "stages", error=EngineError):
        cut_model(PolicyModel(qwen2()), 0, 3)
