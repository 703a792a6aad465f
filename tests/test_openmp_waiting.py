"""`import flowrl` limits the spin of waiting OpenMP threads. The OpenMP library of torch must receive the setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
LIBRARIES = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
"""The OpenMP library of torch. It reads the environment when it is loaded."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def loaded_settings(**variables: str) -> dict[str, str]:
    """Imports flowrl, loads the OpenMP library, and returns the settings that the library has read."""
    program = f"import flowrl, ctypes; ctypes.CDLL({str(LIBRARIES[0])!r})"
    environment = {name: value for name, value in os.environ.items() if name not in _WAITING}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_DISPLAY_ENV": "verbose", **variables}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    settings = (line.split(" = ") for line in output.splitlines() if " = " in line)
    return {name.split()[-1]: value.strip("'") for name, value in settings}


pytestmark = pytest.mark.skipif(not LIBRARIES, reason="this build of torch has no libgomp of its own")


def test_waiting_threads_spin_for_microseconds() -> None:
    settings = loaded_settings()
    assert (settings["OMP_WAIT_POLICY"], settings["GOMP_SPINCOUNT"]) == ("PASSIVE", "5000")


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY", "ACTIVE"),
        ({"GOMP_SPINCOUNT": "12345"}, "GOMP_SPINCOUNT", "12345"),
    ],
)
def test_a_setting_of_the_user_stays(variables: dict[str, str], name: str, value: str) -> None:
    assert loaded_settings(**variables)[name] == value


def test_a_setting_of_another_openmp_library_stays() -> None:
    assert loaded_settings(KMP_BLOCKTIME="200")["GOMP_SPINCOUNT"] != "5000"
