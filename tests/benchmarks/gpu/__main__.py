"""Runs the cells of one part. See tests/run_gpu.sh, which sets the time limits.

Usage: `python -m tests.benchmarks.gpu memory|mfu|grpo|engines|vllm [--device cpu] [--folder DIR]`. Prints one line per
cell, and exits with 1 if a cell failed. `--device cpu` rehearses with tiny sizes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks.gpu.cells import run_cells
from tests.benchmarks.measure import read_arguments

PARTS = ("memory", "mfu", "grpo", "engines", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="folder for models and runs; default: a temporary folder")
    parser.set_defaults(part="memory")
    options = read_arguments(parser, part="mfu", device="cpu")
    with tempfile.TemporaryDirectory() as temporary:
        return run_part(options.part, options.device, options.folder or Path(temporary))


def run_part(part: str, device_type: str, folder: Path) -> int:
    """Runs the cells of a part. Returns the exit code. Needs only the packages of this part."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if part == "memory":
        from tests.benchmarks.gpu.two_processes import two_process_cells  # noqa: PLC0415 (see the docstring)

        return run_cells(two_process_cells(device))
    if part == "mfu":
        from tests.benchmarks.gpu.mfu import START_WITHIN_S, mfu_cells  # noqa: PLC0415 (as above)

        return run_cells(mfu_cells(device), start_within_s=START_WITHIN_S)
    if part == "engines":
        from tests.benchmarks.gpu.engines import engine_cells  # noqa: PLC0415 (as above)

        return run_cells(engine_cells(device, folder))
    if part == "vllm":
        from tests.benchmarks.gpu.vllm_runs import vllm_cells  # noqa: PLC0415 (as above)

        return run_cells(vllm_cells(folder, device_type))
    from tests.benchmarks.gpu.recipe_runs import grpo_cells  # noqa: PLC0415 (as above)

    return run_cells(grpo_cells(folder, device_type))


if __name__ == "__main__":
    sys.exit(main())
