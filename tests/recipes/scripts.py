"""Runs the shell scripts of recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_script(script: Path, output: Path, *settings: str, seed: int = 1) -> None:
    """Runs a script with the environment variables OUTPUT and SEED, in the active environment of Python."""
    variables = {"OUTPUT": str(output), "SEED": str(seed)}
    variables |= {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    command = ["bash", str(script), *settings]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def read_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]
