"""Descriptions of weights, and their parts."""

import pytest
import torch
from torch import Tensor

from flowrl.engines.models.weights import find_rows
from flowrl.engines.rollout.weight_metadata import WeightMetadata, with_tied_names

METADATA = WeightMetadata(("embed", "norm", "scale"), ("float32", "bfloat16", "int64"), ((5, 3), (4,), ()))


def layouts(parts: list[Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(part.dtype, tuple(part.shape)) for part in parts]


def test_metadata_has_names_dtypes_shapes_and_sizes() -> None:
    weights = [("embed", torch.zeros(5, 3)), ("norm", torch.ones(4).bfloat16()), ("scale", torch.tensor(7))]
    assert WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in weights) == METADATA
    assert METADATA.sizes == [60, 8, 8]


def test_a_part_has_consecutive_rows_and_one_part_has_the_weight_without_dimensions() -> None:
    whole = [(torch.float32, (5, 3)), (torch.bfloat16, (4,)), (torch.int64, ())]
    assert layouts(METADATA.part(0, 1)) == whole
    first, second, third = (layouts(METADATA.part(index, 3)) for index in range(3))
    assert first == [(torch.float32, (2, 3)), (torch.bfloat16, (2,)), (torch.int64, (1,))]
    assert second == [(torch.float32, (2, 3)), (torch.bfloat16, (2,)), (torch.int64, (0,))]
    assert third == [(torch.float32, (1, 3)), (torch.bfloat16, (0,)), (torch.int64, (0,))]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 17])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_rows_are_those_of_torch_chunk(num_rows: int, count: int) -> None:
    """FSDP2 and DTensor shard with it. Shards without rows are missing in its result."""
    chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(count)] if num_rows else []
    expected = chunks + [[]] * (count - len(chunks))
    assert [list(range(*find_rows(num_rows, index, count))) for index in range(count)] == expected


def test_a_weight_has_its_name_and_its_tied_names() -> None:
    weights = [("embed", torch.zeros(1)), ("norm", torch.ones(1))]
    named = list(with_tied_names(weights, {"embed": ("head", "third")}))
    assert [name for name, _ in named] == ["embed", "head", "third", "norm"]
    assert all(weight is weights[0][1] for _, weight in named[:3])
