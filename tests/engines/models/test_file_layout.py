"""Weights that transformers combines when it loads files are found in them by name and row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrl.engines.models.file_layout import FilePart, converted_parts, file_parts, split_parts
from tests.engines.families import FAMILIES, build
from tests.engines.tiny import save

MIXTURES = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_all_weights_are_the_entries_of_the_files(name: str, tmp_path: Path) -> None:
    model = build(name)
    save(model, tmp_path)
    weights = model.state_dict()
    own = dict(split_parts(((key, weights[key]) for key in file_parts(model)), file_parts(model)))
    expected = load_file(tmp_path / "model.safetensors")
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_only_mixtures_of_experts_have_converted_weights(name: str) -> None:
    assert bool(converted_parts(build(name))) == (name in MIXTURES)


def test_the_parts_of_experts_are_rows_of_one_weight() -> None:
    parts = converted_parts(build("Mixtral"))["model.layers.1.mlp.experts.gate_up_proj"]
    assert len(parts) == 8  # two matrices of four experts
    assert FilePart("model.layers.1.block_sparse_moe.experts.2.w3.weight", (96, 32), 2, 96) in parts


def test_weights_without_parts_keep_their_names() -> None:
    weight = torch.zeros(2, 3)
    assert list(split_parts([("norm", weight)], {})) == [("norm", weight)]
