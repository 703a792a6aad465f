"""Hypothesis strategies: masks, group ids, scores and row orders."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")

quick = settings(deadline=None, max_examples=25, derandomize=True)
"""Hypothesis settings: deterministic examples, and no deadline, because first calls of torch functions are slow."""

SCORES = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.0, 1.0, 0.1, -7.3]),
)
"""Scores that are often equal and rarely large."""


@st.composite
def grouped_rows(draw: st.DrawFn, min_rows: int = 1, max_num_rows: int = 12) -> tuple[Tensor, Tensor]:
    """(float64 scores [B], int64 groups [B]): ids are arbitrary, groups of any size and in any order."""
    rows = draw(st.integers(min_rows, max_num_rows))
    scores = draw(st.lists(SCORES, min_size=rows, max_size=rows))
    groups = draw(st.lists(st.sampled_from([-3, 0, 7, 10**12]), min_size=rows, max_size=rows))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(groups)


@st.composite
def masks(draw: st.DrawFn, rows: int, max_positions: int = 5) -> Tensor:
    """bool [rows, T], T from 0: rows with holes, and rows without any true position."""
    positions = draw(st.integers(0, max_positions))
    cells = draw(st.lists(st.booleans(), min_size=rows * positions, max_size=rows * positions))
    return torch.tensor(cells, dtype=torch.bool).reshape(rows, positions)


@st.composite
def token_tensors(draw: st.DrawFn, count: int, max_num_rows: int = 6, max_positions: int = 7) -> tuple[Tensor, ...]:
    """`count` float64 tensors [B, T] of normal numbers, and a mask last."""
    mask = draw(masks(draw(st.integers(0, max_num_rows)), max_positions))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return *torch.randn(count, *mask.shape, generator=generator, dtype=torch.float64), mask


def orders(rows: int) -> st.SearchStrategy[Tensor]:
    """int64 [rows], permutations of the rows."""
    return st.permutations(range(rows)).map(lambda order: torch.tensor(order, dtype=torch.int64))
