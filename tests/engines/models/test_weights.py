import numpy as np
import pytest
import torch

from flowrl.engines.models.weights import (
    BFLOAT16,
    WeightsError,
    export_weights,
    load_weights,
    to_tensors,
    weight_buckets,
    weight_shapes,
)
from tests.engines.tiny import qwen2


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_are_bitwise_identical_to_the_exported_ones(dtype: torch.dtype, tied: bool):
    source, target = (qwen2(dtype, seed, tie_word_embeddings=tied) for seed in (0, 1))
    assert not equal(source, target)
    load_weights(target, export_weights(source))
    assert equal(source, target)


def test_tied_weights_are_exported_once_and_stay_tied():
    model = qwen2(tie_word_embeddings=True)
    weights = export_weights(model)
    assert "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights
    load_weights(model, weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bfloat16_is_exported_as_int16_with_a_marked_name():
    weights = export_weights(qwen2(torch.bfloat16))
    assert all(name.endswith(BFLOAT16) and array.dtype == np.int16 for name, array in weights.items())


def test_an_export_is_contiguous_and_does_not_change_with_the_model():
    model = qwen2()
    weights = export_weights(model)
    before = weights["model.norm.weight"].copy()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert np.array_equal(weights["model.norm.weight"], before)
    assert all(array.flags.c_contiguous for array in weights.values())


def test_loading_keeps_the_parameter_objects_of_the_optimizer():
    model, weights = qwen2(seed=0), export_weights(qwen2(seed=1))
    parameters = list(model.parameters())
    load_weights(model, weights)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_read_only_arrays_are_loaded():
    weights = export_weights(qwen2(seed=1))
    for array in weights.values():
        array.flags.writeable = False
    model = qwen2(seed=0)
    load_weights(model, weights)
    assert equal(model, qwen2(seed=1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight"),
        (lambda w: w.update(extra=np.zeros(1, np.float32)), "extra"),
        (lambda w: w.update({"model.norm.weight": np.zeros(3, np.float32)}), r"float32 \[3\]"),
        (lambda w: w.update({"model.norm.weight": np.zeros(64)}), r"float64 \[64\]"),
    ],
)
def test_mismatched_weights_are_rejected_before_any_is_written(change, named: str):
    model, weights = qwen2(seed=0), export_weights(qwen2(seed=1))
    change(weights)
    with pytest.raises(WeightsError, match=named):
        load_weights(model, weights)
    assert equal(model, qwen2(seed=0))


def test_bfloat16_weights_are_rejected_by_a_float32_model():
    with pytest.raises(WeightsError):
        load_weights(qwen2(), export_weights(qwen2(torch.bfloat16)))


def num_bytes(model: torch.nn.Module, names: list[str], item: int) -> int:
    return sum(model.state_dict()[name].numel() * item for name in names)


@pytest.mark.parametrize(("dtype", "item"), [(None, 4), (torch.bfloat16, 2)])
def test_buckets_contain_each_weight_once_in_order_within_the_size_limit(dtype: torch.dtype | None, item: int):
    model = qwen2(tie_word_embeddings=True)
    largest = max(num_bytes(model, [name], item) for name in export_weights(model))
    bound = largest + 1000
    buckets = weight_buckets(weight_shapes(model, dtype=dtype), bound)
    assert len(buckets) > 2
    assert [name for bucket in buckets for name in bucket] == list(export_weights(model))
    sizes = [num_bytes(model, bucket, item) for bucket in buckets]
    assert max(sizes) <= bound
    # A bucket is closed only if the next weight does not fit.
    for size, following in zip(sizes, buckets[1:], strict=False):
        assert size + num_bytes(model, following[:1], item) > bound


def test_a_weight_above_the_size_limit_is_a_bucket_by_itself():
    model = qwen2(tie_word_embeddings=True)
    assert all(len(bucket) == 1 for bucket in weight_buckets(weight_shapes(model), 1))
    assert len(weight_buckets(weight_shapes(model), 1e12)) == 1


def test_buckets_of_an_export_add_up_to_the_full_export():
    model, other = qwen2(seed=0), qwen2(seed=1)
    for bucket in weight_buckets(weight_shapes(model), 5000):
        load_weights(other, export_weights(model, bucket), strict=False)
    assert equal(model, other)


def test_weights_are_cast_before_they_are_sent():
    model = qwen2()
    cast = to_tensors(export_weights(model, dtype=torch.bfloat16))
    assert set(cast) == set(export_weights(model))
    assert all(torch.equal(weight, model.state_dict()[name].bfloat16()) for name, weight in cast.items())


def test_without_a_snapshot_the_arrays_are_the_weights_themselves():
    model = qwen2()
    array = export_weights(model, ["model.norm.weight"], snapshot=False)["model.norm.weight"]
    with torch.no_grad():
        model.model.norm.weight.fill_(7)
    assert (array == 7).all()
