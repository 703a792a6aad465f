"""Samples of weights: which weights and columns a version samples."""

import pytest
import torch

from flowrl.engines.models.weight_samples import chosen_inputs, chosen_names, weight_samples
from flowrl.engines.models.weights import full_weights, meta_copy
from tests.engines.tiny import qwen2

LAYERS = 5
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("q", "norm")]


def test_a_version_samples_one_weight_of_each_kind_and_num_layers_versions_sample_all():
    seen = [chosen_names([*NAMES, "lm_head.weight"], version) for version in range(LAYERS)]
    assert seen[2] == ["model.layers.2.q.weight", "model.layers.2.norm.weight", "lm_head.weight"]
    assert {name for names in seen for name in names} == {*NAMES, "lm_head.weight"}


@pytest.mark.parametrize("width", [1, 3, 4, 7, 64])
def test_successive_versions_sample_all_columns(width: int):
    seen = [chosen_inputs(width, version) for version in range(-(-width // 4) + 1)]
    assert all(len(columns) == min(4, width) and max(columns) < width for columns in seen)
    assert {column for columns in seen for column in columns} == set(range(width))


def test_the_next_visit_of_a_layer_samples_other_columns():
    first, second = (weight_samples(qwen2(), version).samples for version in (0, 2))
    assert [each.name for each in first] == [each.name for each in second]
    assert all(set(a.inputs).isdisjoint(b.inputs) for a, b in zip(first, second, strict=True) if a.kind != "plain")


def test_samples_of_a_model_without_weights_are_read_from_full_weights():
    """As in an engine whose processes have only parts of the model."""
    model, weights = qwen2(), dict(full_weights(qwen2()))
    expected = weight_samples(model, 1).samples
    found = weight_samples(meta_copy(model), 1, read=weights.__getitem__).samples
    assert [each.name for each in found] == [each.name for each in expected]
    assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True))
