"""Parts of logits: together they are every choice once, and none is empty or larger than asked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms.chunks import chunks
from tests.algorithms.strategies import quick


@quick
@given(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 4)), st.integers(1, 40))
def test_parts_cover_every_choice_once(shape: tuple[int, int, int], elements: int):
    choosing_counts, chosen_counts = torch.zeros(shape[:2]), torch.zeros(shape[:2])
    for choosing, chosen in chunks(torch.Size(shape), elements):
        positions = choosing_counts[choosing].numel()
        assert positions > 0 and (positions == 1 or positions * shape[2] <= elements)
        choosing_counts[choosing] += 1
        chosen_counts[chosen] += 1
    assert (choosing_counts[:, :-1] == 1).all() and not choosing_counts[:, -1:].any()
    assert (chosen_counts[:, 1:] == 1).all() and not chosen_counts[:, :1].any()


def test_parts_by_hand():
    found = list(chunks(torch.Size((2, 4, 10)), 20))
    assert found[0] == ((slice(0, 1), slice(0, 2)), (slice(0, 1), slice(1, 3)))
    assert found[1] == ((slice(0, 1), slice(2, 3)), (slice(0, 1), slice(3, 4)))
    assert len(found) == 4


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 1, 3)])
def test_without_a_choice_there_are_no_parts(shape: tuple[int, int, int]):
    assert list(chunks(torch.Size(shape), 8)) == []
