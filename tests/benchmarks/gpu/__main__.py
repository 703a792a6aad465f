"""Runs the cells of one part. See tests/run_gpu.sh, which sets the time limits.

Usage: `python -m tests.benchmarks.gpu PART [--device cpu] [--folder DIR] [--end TIME]`, with a part of `PARTS`.
Prints one line per cell, and exits with 1 if a cell failed. `--device cpu` rehearses with tiny sizes. Cells that would
end after the Unix time TIME are skipped.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks.gpu.cells import Cell, run_cells
from tests.benchmarks.measure import read_arguments

PARTS = ("memory", "mfu", "compile", "compiled_fsdp", "grpo", "engines", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="folder for models and runs; default: a temporary folder")
    parser.add_argument("--end", type=float, default=math.inf, help="Unix time; default: no limit")
    parser.set_defaults(part="memory")
    options = read_arguments(parser, part="mfu", device="cpu")
    with tempfile.TemporaryDirectory() as temporary:
        cells = part_cells(options.part, options.device, options.folder or Path(temporary), options.end)
        return run_cells(cells, end_s=options.end)


def part_cells(part: str, device_type: str, folder: Path, end_s: float) -> list[Cell]:
    """Returns the cells of a part. Needs only the packages of this part."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if part == "memory":
        from tests.benchmarks.gpu.two_processes import two_process_cells  # noqa: PLC0415 (see the docstring)

        return two_process_cells(device)
    if part in ("mfu", "compile", "compiled_fsdp"):
        from tests.benchmarks.gpu import mfu  # noqa: PLC0415 (as above)

        cells = {"mfu": mfu.mfu_cells, "compile": mfu.compile_cells, "compiled_fsdp": mfu.compiled_fsdp_cells}
        return cells[part](device)
    if part == "engines":
        from tests.benchmarks.gpu.engines import engine_cells  # noqa: PLC0415 (as above)

        return engine_cells(device, folder)
    if part == "vllm":
        from tests.benchmarks.gpu.vllm_runs import vllm_cells  # noqa: PLC0415 (as above)

        return vllm_cells(folder, device_type, end_s)
    from tests.benchmarks.gpu.recipe_runs import grpo_cells  # noqa: PLC0415 (as above)

    return grpo_cells(folder, device_type, end_s)


if __name__ == "__main__":
    sys.exit(main())
