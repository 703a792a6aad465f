"""Whether a run may go on in the folder of another: with the same settings, but for those that change no number."""

import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from flowrl.checkpoints.checkpoints import FORMAT, Checkpoint, Checkpoints
from flowrl.checkpoints.input_checksums import refuse_changed_inputs
from flowrl.checkpoints.run_folder import RunFolder, RunFolderError
from flowrl.config import OnPolicyConfig, RunConfig
from flowrl.data.checksums import CheckpointError

MAY_DIFFER = (
    "output",
    "resume",
    "checkpoint.*",
    "report.*",
    "restarts",
    "backend",
    "address",
    "placement.*",
    "devices",
    "threads",
    "call_timeout_s",
    "steps",
    "evaluate_every",
    "rollout.max_num_seqs",
    "*engine.strategy",
    "*engine.shard_ranks",
    "*engine.reshard_after_forward",
    "*engine.offload",
    "*engine.gradient_checkpointing",
    "*engine.sequence_parallel_norms",
    "*engine.packing",
    "*engine.max_tokens_per_microbatch",
)
"""Keys that change time, memory, places or the length of a run, but no number of it."""

_MISSING = object()


def is_resuming(config: RunConfig) -> bool:
    """Whether the run goes on in the folder of an earlier one.

    Raises:
        RunFolderError: that one had other settings, or is over and left no checkpoint.
        CheckpointError: its newest checkpoint has a manifest that cannot be read.
    """
    folder = RunFolder(config.output)
    if config.resume == "never" or not folder.config.exists():
        return False
    _refuse_other_settings(config, folder.config)
    steps = Checkpoints(config.output).steps()
    if not steps and folder.summary.exists():
        raise RunFolderError(
            f"output folder {config.output} holds a run that is over and has no checkpoint to go on from; "
            f"set output to a new folder or remove it"
        )
    if steps and steps[-1] > config.steps:
        raise RunFolderError(
            f"steps is {config.steps}, but the run in {config.output} has come to step {steps[-1]}: "
            f"set steps to {steps[-1]} or more"
        )
    return True


def found(config: RunConfig) -> Checkpoint | None:
    """The checkpoint that the run goes on from, found whole; None for a run that begins. Removes what crashes left.

    Raises: as `is_resuming`; RunFolderError where data or a frozen model are not what they were; CheckpointError where the
        newest checkpoint is damaged, or of a format that lacks what the run goes on from.
    """
    if not is_resuming(config):
        return None
    checkpoints = Checkpoints(config.output)
    newest = checkpoints.newest()
    checkpoints.remove_unfinished()
    if newest is None:
        # It came to nothing that could be gone on from: it begins again, without the curves of the first time.
        shutil.rmtree(config.output / "tensorboard", ignore_errors=True)
    else:
        _refuse_without_rows(config, newest)
        refuse_changed_inputs(newest.driver().get("inputs", {}), config, newest)
    return newest


def _refuse_without_rows(config: RunConfig, newest: Checkpoint) -> None:
    if isinstance(config, OnPolicyConfig) and newest.manifest.format < FORMAT:
        raise CheckpointError(
            f"checkpoint {newest.path} has format {newest.manifest.format}, which says nothing of responses that were "
            f"generated and not trained: go on with the version of flowrl that wrote it, or set output to a new folder"
        )


def _refuse_other_settings(config: RunConfig, path: Path) -> None:
    try:
        # Read by the same class: a setting that is new since then has its default there too.
        old = type(config).model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).model_dump(mode="json")
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise RunFolderError(
            f"{path} is no config of {type(config).__name__} ({str(error).splitlines()[0]}), so its run cannot be gone "
            f"on with; set output to a new folder"
        ) from error
    new = config.model_dump(mode="json")
    for key, before, now in differences(old, new):
        if not any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER):
            raise RunFolderError(
                f"the run in {path.parent} has {key} {_shown(before)}, and this one {_shown(now)}, which changes its "
                f"numbers: set it back, or set output to a new folder"
            )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every setting that differs, in the order of the new config."""
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(name, _MISSING), new.get(name, _MISSING)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield prefix + name, before, now


def _shown(value: object) -> str:
    return "not set" if value is _MISSING else "null" if value is None else str(value)
