"""Reads the files of a run folder: settings, metrics, results, system, and checksums of inputs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import RunFolder
from flowrl.checkpoints.system_info import SYSTEM_FILE
from flowrl.config import UserError
from flowrl.config.source import parse_json, read, read_json

Record = Mapping[str, float]
"""Metrics of a step, with `step`. Values that are not finite are NaN."""


def read_config(folder: Path) -> dict[str, Any]:
    """Returns `config.yaml` of a run folder as plain values. Raises UserError if the folder is not a run folder."""
    fix = "pass the output folder of a run"
    if not folder.exists():
        raise UserError(f"{folder} does not exist: {fix}")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: {fix}")
    path = RunFolder(folder).config
    if not path.is_file():
        if RunFolder(run := folder.resolve().parents[1]).config.is_file():  # a checkpoint
            fix = f"pass {run}, and select the checkpoint with --step"
        raise UserError(f"{folder} is not the folder of a run, because it has no config.yaml: {fix}")
    return read(path).values


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns `summary.json`, or None if the run has not written it. Raises UserError if it is corrupt."""
    return _read_object(RunFolder(folder).summary)


def read_system(folder: Path) -> dict[str, Any] | None:
    """Returns `system.json`, or None if it does not exist, as in runs of earlier versions of flowrl.

    Raises UserError if the file is corrupt.
    """
    return _read_object(folder / SYSTEM_FILE)


def read_inputs(folder: Path) -> dict[str, Any] | None:
    """Returns `inputs.json`, the size and the checksum of each input, or None if the file does not exist.

    Raises UserError if the file is corrupt.
    """
    return _read_object(RunFolder(folder).inputs)


def read_metrics(path: Path) -> list[Record]:
    """Returns the records of `metrics.jsonl` in the order of their steps; none if the file does not exist.

    Ignores an incomplete last line, because the run may be writing it. Raises UserError if another line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore the file, or choose another run") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = parse_json(line)
            values = {name: math.nan if value is None else float(value) for name, value in record.items()}
            records.append(values | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):  # a complete line ends with a line break
                break
            raise UserError(
                f"{path}, line {number} is not the record of a step: remove the line, or choose another run"
            ) from error
    return records


def _read_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object of a file, or None if the file does not exist."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): remove or restore the file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: remove or restore the file")
    return value
