"""The layout of rows that a device, a dtype and the settings select."""

import pytest
import torch

from flowrl.config import EngineConfig
from flowrl.engines.parallel.sharding import can_pack_rows
from flowrl.engines.train.fsdp.outputs import PolicyModel
from tests.engines.tiny import qwen2


@pytest.mark.parametrize(
    ("device", "dtype", "packing", "expected"),
    [
        ("cpu", torch.float32, "auto", True),
        ("cpu", torch.float64, "auto", True),
        ("cuda", torch.bfloat16, "auto", True),
        ("cuda", torch.float16, "auto", True),
        ("cuda", torch.float32, "auto", False),
        ("cuda", torch.float32, "always", True),
        ("cuda", torch.bfloat16, "never", False),
    ],
)
def test_rows_are_not_packed_where_each_row_needs_its_own_kernels(
    device: str, dtype: torch.dtype, packing: str, expected: bool
) -> None:
    config = EngineConfig.model_validate({"packing": packing})
    assert can_pack_rows(PolicyModel(qwen2()), config, device, dtype) == expected
