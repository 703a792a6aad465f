"""The rates of a GPU follow from the name that its driver reports."""

import pytest

from flowrl.devices.device_rates import GPUS, find_rates


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_a_module_is_found_by_its_name(name: str, key: str) -> None:
    assert find_rates(name) is GPUS[key]


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA L4", "NVIDIA A10"]
)
def test_other_gpus_have_no_rates(name: str) -> None:
    assert find_rates(name) is None


def test_the_peaks_of_the_rates_are_those_of_the_model_flops_utilization() -> None:
    assert {name: rates.flops for name, rates in GPUS.items()} == {"h100": 989e12, "h200": 989e12, "a100": 312e12}
