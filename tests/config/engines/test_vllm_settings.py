"""Settings of vLLM whose meaning depends on the devices."""

from typing import Literal

import pytest

from flowrl.config import VllmConfig


@pytest.mark.parametrize(
    ("value", "on_cpus", "on_gpus"), [(False, False, False), (True, True, True), ("auto", False, True)]
)
def test_auto_schedules_ahead_on_gpus(value: bool | Literal["auto"], on_cpus: bool, on_gpus: bool) -> None:
    settings = VllmConfig(async_scheduling=value)
    assert (settings.uses_async_scheduling(on_gpus=False), settings.uses_async_scheduling(on_gpus=True)) == (
        on_cpus,
        on_gpus,
    )
