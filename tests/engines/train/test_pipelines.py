"""Two stages compute what the included engine computes in one process, with a user's engine and the included one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.config import ModelConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.checkpoint.model_folder import in_file_order, write_model
from flowrl.engines.models.loading import load_policy
from tests.engines.closeness import assert_norm_close
from tests.engines.tiny import qwen2, save, to_float64
from tests.engines.train.pipeline_ranks import LOSSES, PIPELINE, main, results, start, weights_after_a_step
from tests.errors import rejects
from tests.processes import run_ranks

RTOL = 1e-9


@pytest.fixture(scope="module", params=[PIPELINE, "fsdp"], ids=["own", "included"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Returns a folder with a model, a checkpoint of the included engine, and the results of an engine's stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    save(to_float64(qwen2(tie_word_embeddings=False, initializer_range=0.1)), folder / "model")
    for name in ("one", "two"):
        (folder / name).mkdir()
    engine = start("fsdp", folder)
    torch.save(results(engine), folder / "expected.pt")
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder / "one")
    checkpoints.result()
    torch.save(weights_after_a_step(engine), folder / "continued.pt")
    run_ranks(main, (folder, request.param), 2)
    return folder


@pytest.fixture(scope="module")
def stages(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "expected.pt", weights_only=False)


def close(actual: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    return actual == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize("step", range(len(LOSSES)), ids=LOSSES)
def test_gradients_and_metrics_are_those_of_the_included_engine(stages: list, expected: dict, step: int) -> None:
    first, last = (stage["steps"][step] for stage in stages)
    assert first["gradients"].keys().isdisjoint(last["gradients"])
    assert_norm_close(first["gradients"] | last["gradients"], expected["steps"][step]["gradients"], RTOL)
    assert close(last["losses"], expected["steps"][step]["losses"])
    assert close(first["step"], expected["steps"][step]["step"]) and close(last["step"], first["step"])


def test_outputs_are_in_the_last_stage(stages: list, expected: dict) -> None:
    assert_norm_close(stages[1]["outputs"], expected["outputs"], RTOL)
    assert close(stages[1]["measured"], expected["measured"])


def test_the_first_rank_exports_all_weights(stages: list, expected: dict) -> None:
    assert_norm_close(stages[0]["weights"], expected["weights"], RTOL)
    assert stages[0]["shapes"] == expected["shapes"]
    for name, weight in stages[0]["half"].items():
        assert torch.equal(weight, stages[0]["weights"][name].bfloat16())


def test_samples_are_columns_of_the_exported_weights(stages: list, expected: dict) -> None:
    assert [sample[:3] for sample in stages[0]["samples"]] == [sample[:3] for sample in expected["samples"]]
    for name, kind, inputs, values in stages[0]["samples"]:
        weight = stages[0]["weights"][name]
        assert torch.equal(values, weight if kind == "plain" else weight[:, list(inputs)].T)


def test_each_engine_continues_from_a_checkpoint_of_the_other(folder: Path, stages: list) -> None:
    assert_norm_close(stages[0]["resumed"], torch.load(folder / "continued.pt"), RTOL)
    engine = start("fsdp", folder)
    load(engine, folder / "two")
    assert_norm_close(weights_after_a_step(engine), torch.load(folder / "continued.pt"), RTOL)


def test_a_saved_model_has_the_weights_and_loads_with_transformers(tmp_path: Path) -> None:
    save(to_float64(qwen2(tie_word_embeddings=False, initializer_range=0.1)), tmp_path / "model")
    engine = start(PIPELINE, tmp_path)
    shapes = in_file_order(engine.weight_shapes())
    weights = engine.export_weights([name for name, _, _ in shapes])
    write_model("policy", engine.describe_model(), shapes, weights, tmp_path / "model", tmp_path / "saved")
    saved, original = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", tmp_path / "model"))
    assert saved.keys() == original.keys() and all(torch.equal(saved[name], original[name]) for name in saved)
    load_policy(ModelConfig(path=tmp_path / "saved", dtype="float64"))


def test_a_model_that_the_engine_cannot_split_is_rejected(tmp_path: Path) -> None:
    save(qwen2(), tmp_path / "model")
    with rejects("tied"):
        start(PIPELINE, tmp_path)
