"""Reads the recorded steps of a run, in `RUN/recorded/step-000007/`.

A recording has the format of a checkpoint: the states of roles and driver objects before the step, and a manifest with
checksums. The manifest is written last. A recording also has the config of the run, the batch (`batch.safetensors`),
and the columns that calls returned (`calls/`). `step.json` has the calls, the metrics and the checksums of the states
after the step.
"""

import platform
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.config import UserError
from flowrl.config.source import read_json
from flowrl.controller.placement.inventory import local_gpu_names
from flowrl.data.checksums import CheckpointError
from flowrl.devices.device import has_gpu

FOLDER = "recorded"
"""Folder of the recordings in the output folder of a run."""

CONFIG, BATCH, STEP = "config.yaml", "batch.safetensors", "step.json"
"""Names of files in the folder of a recording."""

FORMAT = 3
"""Version of the format of recordings."""


@dataclass(frozen=True)
class Recording:
    """A complete recording of a step."""

    checkpoint: Checkpoint
    values: Mapping[str, Any]  # Any: JSON values
    """Contents of `step.json`."""

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step

    @property
    def num_threads(self) -> int | None:
        """Largest number of torch CPU threads of the processes that ran the recipe's calls. None without calls."""
        threads = [role["threads"] for role in self.values["roles"].values()]
        return max(threads, default=None)

    @property
    def sharded_roles(self) -> list[str]:
        """Roles whose model FSDP2 sharded, possibly on one rank. The inline backend does not shard."""
        return [name for name, role in self.values["roles"].items() if role["is_sharded"]]

    def describe_inexactness(self) -> str:
        """Returns why an inline replay differs by rounding, such as `actor had 2 ranks and critic was sharded`.

        Returns an empty string if an inline replay must be bitwise identical.
        """
        sizes = {name: role["world_size"] for name, role in self.values["roles"].items()}
        reasons = [f"{name} had {size} ranks" for name, size in sizes.items() if size > 1]
        reasons += [f"{name} was sharded" for name in self.sharded_roles if sizes[name] == 1]
        return " and ".join(reasons)


@dataclass(frozen=True)
class StepResults:
    """Results of a step: the values of `step.json`, and the folder with the columns that calls returned."""

    values: Mapping[str, Any]  # Any: JSON values
    folder: Path


def recordings(run: Path) -> Checkpoints:
    """Returns the folder of a run's recorded steps, which has the format of a folder of checkpoints."""
    return Checkpoints(run, FOLDER)


def read_recording(run: Path, step: int | None) -> Recording:
    """Returns the verified recording of a step. None selects the only recording of a run.

    Raises UserError if the run has no such recording, or if it has several and `step` is None. Raises CheckpointError
    if the recording is corrupt or has another format.
    """
    folder = recordings(run)
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: pass the output folder of a run")
    steps = folder.steps()
    if not steps:
        raise UserError(
            f"{run} has no recorded step: set record to a list of steps, such as record=[{step or 5}], when you start "
            f"or resume the run"
        )
    available = ", ".join(map(str, steps))
    if step is None and len(steps) > 1:
        raise UserError(f"{run} has several recorded steps ({available}): choose one with --step")
    step = steps[0] if step is None else step
    if step not in steps:
        raise UserError(f"{run} has no recording of step {step}; recorded steps: {available}")
    try:
        checkpoint = folder.read(step)
        checkpoint.check()
        values = read_json(checkpoint.path / STEP)
    except CheckpointError as error:
        text = str(error).replace("checkpoint ", "recording ", 1)
        raise CheckpointError(f"{text}; remove the folder, and record the step again") from None
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"recording {checkpoint.path} has format {values['format']}, but this version of flowrl reads {FORMAT}: "
            f"replay it with the version that wrote it"
        )
    return Recording(checkpoint, values)


def describe_machine() -> dict[str, str]:
    """Returns the properties of this process on which the rounding of results depends."""
    values = {"cpu": torch.backends.cpu.get_cpu_capability(), "architecture": platform.machine()}
    if has_gpu() and (names := local_gpu_names()):
        values["gpu"] = " and ".join(sorted(names))
    return values


def source_checksums() -> dict[str, int]:
    """Returns module -> CRC-32 of its source file, for loaded modules of flowrl, of the recipes, and below the working
    folder.
    """
    checksums = {}
    working_folder = Path.cwd()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name == "__main__" or not file.endswith(".py"):
            continue
        path = Path(file)
        is_local = path.is_relative_to(working_folder) and "site-packages" not in path.parts
        if is_local or name.partition(".")[0] in ("flowrl", "recipes"):
            checksums[name] = zlib.crc32(path.read_bytes()) if path.is_file() else 0
    return checksums


def changed_sources(recorded: Mapping[str, int]) -> list[str]:
    """Returns the modules whose source files have other checksums than in the recording.

    Ignores modules that are not loaded in this process.
    """
    current = source_checksums()
    return sorted(name for name, crc32 in recorded.items() if current.get(name, crc32) != crc32)
