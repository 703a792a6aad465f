"""Overview of a run for the report: its name, status, results, health findings, roles, and what is missing."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_files import Record, read_system
from flowrl.checkpoints.run_folder import RunFolder, RunFolderError, check_not_locked
from flowrl.config import UserError
from flowrl.data.metric import FAILED_AS_BEST, FAILED_AS_WORST, NUM_FAILED, held_out_bounds
from flowrl.health import read_findings
from flowrl.health.monitor import FILE

_EVALUATED = ("accuracy", "validation_loss", "agreement", "evaluation/")
"""Prefixes of the names of metrics that an evaluation logs."""


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns a short unique name per folder: the shortest end of its path that no other folder has.

    Raises UserError if two folders are the same.
    """
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise UserError(f"{folders[i]} is given twice: pass each run once")
    names = []
    for folder in resolved:
        others = [other for other in resolved if other != folder]
        parts = folder.parts
        size = 1
        while size < len(parts) and any(other.parts[-size:] == parts[-size:] for other in others):
            size += 1
        names.append("/".join(parts[-size:]))
    return names


def run_data(
    folder: Path, name: str, settings: Mapping[str, Any], records: Sequence[Record], summary: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the overview of a run, without its curves, trace and rows."""
    last = records[-1] if records else {}
    return {
        "name": name,
        "path": str(folder),
        "recipe": _recipe_name(settings),
        "status": _status(folder, summary),
        "steps": int(last.get("step", 0)),
        "steps_requested": settings.get("steps"),
        "seconds": (summary or {}).get("seconds", last.get("elapsed_s")),
        "peak_memory_mb": (summary or {}).get("peak_memory_mb", last.get("memory_mb")),
        "seed": settings.get("seed"),
        "schedule": settings.get("schedule"),
        "summary": dict(summary or {}),
        "evaluations": evaluations(records),
        "roles": _roles(settings),
        "pools": (settings.get("placement") or {}).get("pools") or {},
        "system": read_system(folder),
        "findings": _findings(folder),
    }


def find_profiles(folder: Path, page_folder: Path) -> list[dict[str, str]]:
    """Returns the name of each profile of a run, such as `step 10: actor-0/001-update.json.gz`, and its path relative
    to `page_folder`, the folder of the page.
    """
    profiles = RunFolder(folder).profiles
    files = sorted(profiles.glob("step-*/*/*.json.gz"))
    return [
        {
            "name": f"step {int(file.parts[-3].removeprefix('step-'))}: {file.parts[-2]}/{file.name}",
            "path": Path(os.path.relpath(file, page_folder)).as_posix(),
        }
        for file in files
    ]


def _findings(folder: Path) -> list[dict[str, Any]] | None:
    """Returns the findings of the health checks, or None for a run of a version of flowrl without health checks."""
    if not (folder / FILE).exists():
        return None
    try:
        return [asdict(finding) for finding in read_findings(folder)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / FILE} is corrupt ({error}): remove or restore the file") from error


def _recipe_name(settings: Mapping[str, Any]) -> str | None:
    """Returns the name of the recipe, such as `grpo` for `recipes.grpo.config:GRPOConfig`."""
    recipe = settings.get("recipe")
    if not isinstance(recipe, str):
        return None
    module = recipe.partition(":")[0].split(".")
    return module[1] if len(module) == 3 and module[0] == "recipes" else recipe


def _status(folder: Path, summary: Mapping[str, Any] | None) -> str:
    """Returns `running`, `complete`, `interrupted` (by a signal) or `ended early` (without `summary.json`)."""
    try:
        check_not_locked(folder)
    except RunFolderError:
        return "running"
    if summary is None:
        return "ended early"
    return "complete" if summary.get("interrupted_by") is None else "interrupted"


def _roles(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns name, pool, model and engine of the roles of the placement. Omits roles for which the config has no
    settings.
    """
    placed = (settings.get("placement") or {}).get("roles") or {}
    roles = []
    for name, placement in placed.items():
        role = settings.get(name)
        if not isinstance(role, Mapping):
            continue
        model = role.get("model")
        path = model.get("path") if isinstance(model, Mapping) else None
        pool = placement.get("pool") if isinstance(placement, Mapping) else placement
        roles.append({"name": name, "pool": pool, "model": path, "engine": role.get("engine")})
    return roles


def evaluations(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the first and the last value of each metric of an evaluation, with their steps and intervals.

    The interval of `accuracy` is `evaluation/accuracy_low` to `evaluation/accuracy_high`. For the set NAME, the
    interval of `accuracy/NAME` begins at `evaluation/accuracy_low/NAME`. An interval that the run has not logged is
    None. `has_failures` is true if rewards failed in one of the two evaluations. The two values are then means over
    different responses.
    """
    names = dict.fromkeys(name for record in records for name in record if name.startswith(_EVALUATED))
    bounds = {bound for name in names for bound in _interval_names(name)}
    results = []
    for name in (name for name in names if name not in bounds):
        points = [record for record in records if isfinite(_value(record, name))]
        if points:
            first, last = points[0], points[-1]
            results.append(
                {
                    "name": name,
                    "first_step": first["step"],
                    "first": _value(first, name),
                    "first_interval": _interval(first, name),
                    "last_step": last["step"],
                    "last": _value(last, name),
                    "last_interval": _interval(last, name),
                    "has_failures": any(
                        low < high for low, high in (held_out_bounds(record, name) for record in (first, last))
                    ),
                }
            )
    return results


def _value(record: Record, name: str) -> float:
    """Returns the value of a metric, or NaN.

    An evaluation without failed rewards logs no metrics of failed rewards. For `FAILED_AS_WORST` and `FAILED_AS_BEST`,
    the accuracy is then returned, and 0 for the others.
    """
    if name in record or not name.startswith(NUM_FAILED):
        return record.get(name, nan)
    group, metric, *ending = name.split("/", 2)
    accuracy = record.get("/".join(("accuracy", *ending)), nan)
    is_bound = f"{group}/{metric}" in (FAILED_AS_WORST, FAILED_AS_BEST)
    return accuracy if is_bound or not isfinite(accuracy) else 0.0


def _interval_names(name: str) -> tuple[str, str]:
    metric, slash, ending = name.partition("/")
    return f"evaluation/{metric}_low{slash}{ending}", f"evaluation/{metric}_high{slash}{ending}"


def _interval(record: Record, name: str) -> list[float] | None:
    low, high = (record.get(bound, nan) for bound in _interval_names(name))
    return [low, high] if isfinite(low) and isfinite(high) else None
