"""Attention within rows, padded and packed, compared with an explicit mask and softmax."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from flowrl.engines.models import attention
from flowrl.engines.models.attention import Pack, attend, pack_rows, packing_obstacle
from tests.engines.closeness import assert_norm_close
from tests.engines.families import FAMILIES, build
from tests.engines.tiny import convolving

LENGTHS = [3, 5, 5, 17]
VARIANTS = {
    "plain": {},
    "scaled": {"scaling": 0.3},
    "a window": {"window": 4},
    "a cap": {"softcap": 1.5},
    "a window and a cap": {"window": 4, "softcap": 1.5},
}


def states(dtype: torch.dtype = torch.float64, device: str = "cpu", width: int = 8) -> list[Tensor]:
    """Returns queries of four heads, and keys and values of two heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), width) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def expected(query: Tensor, key: Tensor, value: Tensor, scaling=None, window=None, softcap=None) -> Tensor:
    """Computes attention with a mask over other rows, later tokens, and tokens before the window."""
    row_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place_T = torch.arange(len(row_T))
    back_TT = place_T[:, None] - place_T
    is_seen_TT = (row_T[:, None] == row_T) & (back_TT >= 0) & (back_TT < (window or math.inf))
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits.masked_fill(~is_seen_TT, -math.inf).softmax(-1) @ value).transpose(1, 2)


def with_gradients(attended: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.rand(attended.shape, generator=torch.Generator().manual_seed(1))
    return [attended, *torch.autograd.grad((attended * weights.to(attended)).sum(), inputs)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_tokens_attend_only_to_their_own_row(variant: str):
    options, inputs = VARIANTS[variant], states()
    actual = with_gradients(attend(*inputs, pack=pack_rows(LENGTHS), **options), inputs)
    assert_norm_close(actual, with_gradients(expected(*inputs, **options), inputs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_rows_have_the_same_results(variant: str):
    options, inputs, pack = VARIANTS[variant], states(), pack_rows(LENGTHS)
    mask_BL = torch.arange(17) < torch.tensor(LENGTHS)[:, None]
    padded = [
        x.new_zeros(4, 17, x.shape[1], 8).masked_scatter(mask_BL[..., None, None], x[0].transpose(0, 1)) for x in inputs
    ]
    rows = attend(*(x.transpose(1, 2) for x in padded), pack=None, **options)
    assert_norm_close(rows[mask_BL][None], attend(*inputs, pack=pack, **options))


class KeyHeads(TorchFunctionMode):
    """Records the number of key heads of each attention call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.counts.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "num_heads"),
    [
        ("cpu", torch.float32, 2),
        ("cpu", torch.bfloat16, 2),
        ("cuda", torch.float32, 4),
        ("cuda", torch.float64, 4),
        ("cuda", torch.bfloat16, 2),
        ("cuda", torch.float16, 2),
    ],
)
def test_key_heads_are_repeated_where_no_kernel_groups_them(device: str, dtype: torch.dtype, num_heads: int) -> None:
    """Fake tensors have the device type of a GPU, although there is none."""
    with FakeTensorMode(), KeyHeads() as recorded:
        query, key, value = (torch.empty(3, heads, 16, 8, device=device, dtype=dtype) for heads in (4, 2, 2))
        attend(query, key, value, pack=None)
    assert recorded.counts == [num_heads]


def test_keys_are_saved_once_per_key_head_in_the_kernel_of_packed_rows() -> None:
    """torch's kernel has shapes for fake tensors on any device. It saves keys and values [T, H, E]."""
    pack, saved = pack_rows(LENGTHS), []
    with FakeTensorMode(), saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        inputs = [torch.empty(1, heads, 30, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
        fake = pack.with_tensors(*(torch.empty(x.shape, dtype=x.dtype) for x in pack.tensors))
        attended = attention._attend_varlen(inputs[0], inputs[1], inputs[2], fake, None, None)
    assert attended.shape == (1, 30, 4, 8)
    # Queries and the output have four heads.
    assert (saved.count((30, 2, 8)), saved.count((30, 4, 8))) == (2, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_saves_no_attention_weights(dtype: torch.dtype) -> None:
    """In float32, the weights of four heads and 8192 tokens have 1 GB; queries, keys, values and output have 13 MB."""
    inputs = [torch.randn(1, heads, 8192, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*inputs, pack=None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 100_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_on_a_gpu_equals_attention_on_a_cpu(variant: str, dtype: torch.dtype):
    options, inputs = VARIANTS[variant], states(dtype, "cuda", width=64)
    pack: Pack = pack_rows(LENGTHS).to("cuda")
    actual = with_gradients(attend(*inputs, pack=pack, **options), inputs)
    known = [x.detach().double().cpu().requires_grad_() for x in inputs]
    for one, other in zip(actual, with_gradients(expected(*known, **options), known), strict=True):
        assert_norm_close(one.double().cpu(), other, rtol=0.03)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_documented_families_support_packing(name: str):
    assert packing_obstacle(build(name)) is None


def test_layers_that_mix_tokens_outside_of_attention_require_padding():
    assert packing_obstacle(convolving()) == "conv layers"
