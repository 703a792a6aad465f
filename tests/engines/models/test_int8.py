"""Models whose layers multiply in int8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flowrl.config import ModelConfig
from flowrl.engines.models.int8 import Int8Linear, int8_layers, int8_product, int8_product_by_blocks, quantized_copy
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weights import full_weights, write_weights
from tests.engines import families, tiny
from tests.engines.closeness import assert_norm_close
from tests.engines.rollout.hf.test_engine import generate, prompts, rollout, rows_of

CPU = torch.device("cpu")
SHAPES = [(1, 1, 1), (3, 30, 7), (17, 64, 33), (40, 3072, 96), (33, 1025, 40)]


def quantized(model):
    int8_model = quantized_copy(model, CPU)
    write_weights(int8_model, full_weights(model))
    return int8_model


def linear(weight: list[list[float]], bias: list[float] | None = None) -> Int8Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    int8_model = Int8Linear(layer, CPU)
    int8_model.load_weight(torch.tensor(weight))
    if bias is not None:
        int8_model.bias = nn.Parameter(torch.tensor(bias))
    return int8_model


def test_each_output_channel_has_a_scale_that_maps_its_largest_weight_to_127() -> None:
    layer = linear([[2.54, -1.0], [0.127, 0.0635], [0.0, 0.0]])
    assert layer.scale[:2].tolist() == pytest.approx([0.02, 0.001])
    # 0.0635 / 0.001 is between 63 and 64.
    assert layer.weight[:1].tolist() == [[127, -50]] and layer.weight[2].tolist() == [0, 0]
    assert layer.weight[1].tolist() in ([127, 63], [127, 64])


def test_each_token_has_its_own_scale() -> None:
    layer = linear([[1.27, 0.5], [-0.3, 1.27]], bias=[10.0, -10.0])
    inputs = torch.tensor([[12.7, 1.04], [0.0127, -0.0006]])
    # Integers [127, 10] x 0.1 and [127, -6] x 0.0001 meet [127, 50] and [-30, 127], both x 0.01.
    expected = [[16629 * 1e-3 + 10, -2540 * 1e-3 - 10], [15829 * 1e-6 + 10, -4572 * 1e-6 - 10]]
    assert_norm_close(layer(inputs), torch.tensor(expected))


def test_non_finite_inputs_have_non_finite_outputs() -> None:
    outputs = linear([[1.0, 0.5]])(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 1.0]]))
    assert outputs.isfinite().flatten().tolist() == [False, False, True]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_product_equals_the_integer_product(rows: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, generator=generator)
    right = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    left[0] = right[0] = 127
    expected = left.int() @ right.int().t()
    assert torch.equal(int8_product(left, right), expected)
    assert torch.equal(int8_product_by_blocks(left, right), expected)


@pytest.mark.slow
def test_int8_products_are_exact_on_cpus_with_16_bit_accumulation() -> None:
    code = (
        "import torch; from flowrl.engines.models.int8 import int8_product; left = torch.full((20, 3072), 127,"
        "dtype=torch.int8); print(set(int8_product(left, left[:9]).flatten().tolist()))"
    )
    for instructions in ("AVX2", "DEFAULT"):
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": "."}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str({3072 * 127**2}), instructions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_gpu_has_the_same_product(rows: int, inputs: int, outputs: int) -> None:
    left = torch.full((rows, inputs), 127, dtype=torch.int8)
    right = torch.full((outputs, inputs), -127, dtype=torch.int8)
    assert torch.equal(int8_product(left.cuda(), right.cuda()).cpu(), int8_product(left, right))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_layers_are_quantized_and_other_modules_are_not(name: str) -> None:
    model = families.build(name)
    int8_model = quantized(model)
    matrices = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and ".layers." in f".{n}"}
    matrices |= {n: m for n, m in model.named_modules() if isinstance(m, Conv1D)}
    assert int8_layers(int8_model).keys() == matrices.keys() and len(matrices) >= 8
    unquantized = {
        n: w
        for n, w in int8_model.state_dict().items()
        if n.removesuffix(".weight").removesuffix(".scale") not in matrices
    }
    assert all(torch.equal(weight, model.state_dict()[n]) for n, weight in unquantized.items())
    ids = torch.randint(2, 28, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gap = (model(ids).logits.log_softmax(-1) - int8_model(ids).logits.log_softmax(-1)).abs().mean()
    assert 0 < gap < 0.1


def test_a_quantized_copy_shares_no_memory_and_has_no_float_weights() -> None:
    model = tiny.qwen2()
    int8_model = quantized(model)
    ends = sum(weight.nbytes for name, weight in model.named_parameters() if "_proj.weight" not in name)
    outputs = sum(len(weight) for name, weight in model.named_parameters() if "_proj.weight" in name)
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if "_proj.weight" in name)
    tensors = {id(tensor): tensor for tensor in (*int8_model.parameters(), *int8_model.buffers())}
    rotary = sum(buffer.nbytes for buffer in model.buffers())
    assert sum(tensor.nbytes for tensor in tensors.values()) == ends + matrices + 4 * outputs + rotary
    own = {tensor.data_ptr() for tensor in tensors.values()}
    assert not own & {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}


def test_a_loaded_folder_is_quantized_like_its_model(tmp_path: Path) -> None:
    model = tiny.qwen2(torch.bfloat16)
    tiny.save(model, tmp_path)
    source = load_policy(ModelConfig(path=tmp_path, dtype="bfloat16"), on_meta=True)
    int8_model = quantized_copy(source, CPU)
    write_weights(int8_model, stream_full_weights(source))
    expected = quantized(model).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in int8_model.state_dict().items())


def test_a_row_is_bitwise_the_same_in_any_batch_and_on_any_number_of_threads() -> None:
    model, prompt_ids = quantized(tiny.qwen2()), prompts(40)
    expected_rows = rows_of(generate(rollout(model), prompt_ids))
    for max_num_seqs in (7, 33):
        assert rows_of(generate(rollout(model, max_num_seqs=max_num_seqs), prompt_ids)) == expected_rows
    torch.set_num_threads(2)
    assert rows_of(generate(rollout(model), prompt_ids)) == expected_rows


def test_generation_equals_generation_without_cache_or_batch() -> None:
    model = quantized(tiny.qwen2())
    prompt_ids = prompts(6)
    for prompt, (ids, logprobs) in zip(prompt_ids, rows_of(generate(rollout(model), prompt_ids)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        # A rounding error of float32 can move an input to the next of 255 steps.
        assert_norm_close(torch.tensor(logprobs), expected, rtol=2 / 255)
