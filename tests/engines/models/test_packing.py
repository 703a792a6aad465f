import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.engines.models.attention import pack_rows


def test_rows_of_2_3_and_3_tokens_are_concatenated():
    pack = pack_rows([2, 3, 3])
    assert pack.padded_index_T.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert pack.positions_T.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert pack.cu_seqlens.tolist() == [0, 2, 5, 8] and pack.cu_seqlens.dtype == torch.int32
    assert (pack.max_length, pack.equal_length_runs) == (3, [(1, 2), (2, 3)])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_unpacking_restores_positions(lengths: list[int]):
    pack, longest = pack_rows(lengths), max(lengths)
    is_real_BL = torch.arange(longest) < torch.tensor(lengths)[:, None]
    rows_BL = torch.rand(is_real_BL.shape)
    assert pack.pack(rows_BL).shape == (1, sum(lengths))
    assert torch.equal(pack.unpack(pack.pack(rows_BL), rows_BL.shape), rows_BL.where(is_real_BL, 0))


def test_a_filler_row_is_excluded_from_unpacked_rows():
    pack = pack_rows([2, 3]).with_filler_row(2)
    assert (pack.lengths, pack.positions_T.tolist()) == ((2, 3, 2), [0, 1, 0, 1, 2, 0, 1])
    assert pack.cu_seqlens.tolist() == [0, 2, 5, 7] and pack.cu_seqlens.dtype == torch.int32
    assert pack.unpack(torch.arange(5.0)[None], torch.Size([2, 3])).tolist() == [[0, 1, 0], [2, 3, 4]]


def test_gradients_of_padding_are_dropped():
    pack = pack_rows([1, 2])
    values_1T = torch.ones(1, 3, requires_grad=True)
    (pack.unpack(values_1T, torch.Size([2, 2])) * torch.tensor([[2.0, 9.0], [3.0, 4.0]])).sum().backward()
    assert values_1T.grad is not None and values_1T.grad.tolist() == [[2.0, 3.0, 4.0]]
