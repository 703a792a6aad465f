"""The bytes and the memory of each parallelism are those that the plan expects."""

from pathlib import Path

import pytest

from tests.benchmarks.parallel import CASES, measure

EXACT = ("zero1", "tp", "sp", "pp", "tp, LoRA")
"""Cases whose bytes do not depend on the backend. gloo's reduce-scatter of FSDP receives full gradients."""

BYTES_RTOL = 0.05
"""Messages have headers, and ranks also exchange norms and counts."""

PEAK_RTOL = 0.2
"""The accuracy of the estimate (docs/training.md)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_measured_bytes_and_peaks_are_those_expected(tmp_path: Path) -> None:
    names = [name for name in CASES if name == "single" or name in EXACT]
    for result in measure(tmp_path, 1, names):
        if result.processes > 1:
            assert result.received_mib == pytest.approx(result.expected_received_mib, rel=BYTES_RTOL), result.what
        assert result.peak_mib == pytest.approx(result.expected_peak_mib, rel=PEAK_RTOL), result.what
