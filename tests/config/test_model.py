"""Settings of a model's engine."""

import pytest

from flowrl.config import EngineConfig, compiles


@pytest.mark.parametrize(
    ("on_gpu", "is_parallel", "is_deterministic", "expected"),
    [(True, False, False, True), (False, False, False, False), (True, True, False, False), (True, False, True, False)],
)
def test_auto_compiles_layers_without_collectives_on_gpus(
    on_gpu: bool, is_parallel: bool, is_deterministic: bool, expected: bool
) -> None:
    found = compiles(EngineConfig(), on_gpu=on_gpu, is_parallel=is_parallel, is_deterministic=is_deterministic)
    assert found is expected


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_another_value_decides_alone(setting: bool, on_gpu: bool) -> None:
    engine = EngineConfig(compile=setting)
    assert compiles(engine, on_gpu=on_gpu, is_parallel=True, is_deterministic=False) is setting
