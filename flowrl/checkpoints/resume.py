"""Finds the checkpoint from which a run resumes. Rejects changes of settings or inputs that would change results."""

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from flowrl.checkpoints.checkpoints import FORMAT, Checkpoint, Checkpoints
from flowrl.checkpoints.run_folder import RunFolder, RunFolderError
from flowrl.config import ActorConfig, CriticConfig, DataConfig, OnPolicyConfig, RunConfig, models_of
from flowrl.data.checksums import CheckpointError, FileChecksum

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
"""Patterns of settings that may change on resume."""

_MISSING = object()

_FULL_CHECKSUM_BYTES = 256 * 1024**2
"""Largest model file, in bytes, whose checksum covers the full file. Larger files are sampled."""

_CHUNK_BYTES = 1024**2
"""Bytes per sampled chunk of a large file. Chunks are evenly spaced over the file."""


def is_resuming(config: RunConfig) -> bool:
    """Whether the run continues an earlier run in its output folder. Raises RunFolderError if the settings differ."""
    folder = RunFolder(config.output)
    if config.resume == "never" or not folder.config.exists():
        return False
    _check_same_settings(config, folder.config)
    steps = Checkpoints(config.output).steps()
    if not steps and folder.summary.exists():
        raise RunFolderError(
            f"output folder {config.output} has a finished run without a checkpoint to resume from: set output to a "
            f"new folder, or remove it"
        )
    if steps and steps[-1] > config.steps:
        raise RunFolderError(
            f"steps is {config.steps}, but the run in {config.output} is at step {steps[-1]}: "
            f"set steps to {steps[-1]} or more"
        )
    return True


def find_checkpoint(config: RunConfig) -> Checkpoint | None:
    """Returns the verified checkpoint from which the run resumes, or None if it starts from step 0.

    Removes incomplete saves. Raises RunFolderError if settings, data or a frozen model have changed, and
    CheckpointError if the newest checkpoint is corrupt or lacks the pending rollouts.
    """
    if not is_resuming(config):
        return None
    checkpoints = Checkpoints(config.output)
    newest = checkpoints.newest()
    checkpoints.remove_unfinished()
    if newest is None:
        # Without a checkpoint the run starts over, so the old TensorBoard events are removed.
        shutil.rmtree(config.output / "tensorboard", ignore_errors=True)
        return None
    if isinstance(config, OnPolicyConfig) and newest.manifest.format < FORMAT:
        raise CheckpointError(
            f"checkpoint {newest.path} has format {newest.manifest.format}, which lacks pending rollouts: resume with "
            f"the version of flowrl that wrote it, or set output to a new folder"
        )
    _check_same_inputs(newest.driver().get("inputs", {}), config, newest)
    return newest


# Settings.


def _check_same_settings(config: RunConfig, path: Path) -> None:
    """Raises RunFolderError if a setting outside `MAY_DIFFER` differs from the earlier run's `config.yaml`."""
    try:
        # Validation adds the default of every setting that did not exist when the earlier run started.
        old = type(config).model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).model_dump(mode="json")
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise RunFolderError(
            f"{path} is not a valid {type(config).__name__} ({str(error).splitlines()[0]}), so this run cannot be "
            f"resumed: set output to a new folder"
        ) from error
    for key, before, now in differences(old, config.model_dump(mode="json")):
        if not any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER):
            raise RunFolderError(
                f"{key} was {_format(before)} in the run in {path.parent} and is now {_format(now)}, which would "
                f"change results; restore the old value, or set output to a new folder"
            )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old value, new value) of every setting that differs, in the order of the new config."""
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(name, _MISSING), new.get(name, _MISSING)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield prefix + name, before, now


def _format(value: object) -> str:
    return "not set" if value is _MISSING else "null" if value is None else str(value)


# Inputs are data files and frozen models. Checkpoints contain only their checksums.


def input_checksums(config: RunConfig) -> dict[str, FileChecksum]:
    """Returns the checksum of the files at each path of the config, except trained models and unreadable paths."""
    files: dict[str, Sequence[Path]] = {}
    for name, value in config:
        if isinstance(value, DataConfig):
            files[f"{name}.train"] = [value.train]
            if value.test is not None:
                files[f"{name}.test"] = [value.test]
    for prefix, role in models_of(config).values():
        is_trained = isinstance(role, ActorConfig | CriticConfig) and role.lora is None
        if role.model is not None and not is_trained:
            files[f"{prefix}model.path"] = sorted(role.model.path.glob("*.safetensors"))
    checksums = {key: _combined_checksum(paths) for key, paths in files.items() if paths}
    return {key: checksum for key, checksum in checksums.items() if checksum is not None}


def _check_same_inputs(old: Mapping[str, Sequence[int]], config: RunConfig, checkpoint: Checkpoint) -> None:
    for key, now in input_checksums(config).items():
        before = FileChecksum(*old[key]) if key in old else now
        if before != now:
            raise RunFolderError(
                f"the file at {key} has changed since step {checkpoint.manifest.step} of the run in {config.output} "
                f"({_difference(before, now)}), which would change results; restore the old file, or set output to a "
                f"new folder"
            )


def check_base_model(checkpoint: Checkpoint, base: Path) -> None:
    """Raises RunFolderError if `base` contains another model than the base model of the checkpoint's adapter."""
    old = checkpoint.driver().get("inputs", {})
    before = next((FileChecksum(*old[key]) for key in ("actor.model.path", "model.path") if key in old), None)
    if before is None:  # a Hub name, or a checkpoint without checksums
        return
    now = _combined_checksum(sorted(base.glob("*.safetensors")))
    if not base.is_dir() or now != before:
        reason = _difference(before, now) if base.is_dir() and now is not None else "it is missing"
        raise RunFolderError(
            f"the adapter of step {checkpoint.manifest.step} was trained on the model in {base}, which has changed "
            f"({reason}): restore the original model"
        )


def _difference(before: FileChecksum, now: FileChecksum) -> str:
    same_size = before.size == now.size
    return "other contents of the same size" if same_size else f"{now.size:,} bytes instead of {before.size:,}"


def _combined_checksum(paths: Sequence[Path]) -> FileChecksum | None:
    """Returns one checksum over several files, or None if a file is unreadable."""
    size = crc32 = 0
    try:
        for path in paths:
            size += path.stat().st_size
            crc32 = _update_crc32(path, crc32)
    except OSError:
        return None
    return FileChecksum(size, crc32)


def _update_crc32(path: Path, crc32: int) -> int:
    """Continues a CRC-32 over a file, or over samples of a large file."""
    size, num_samples = path.stat().st_size, _FULL_CHECKSUM_BYTES // _CHUNK_BYTES
    is_small = size <= _FULL_CHECKSUM_BYTES
    with path.open("rb") as file:
        for i in range(-(-size // _CHUNK_BYTES) if is_small else num_samples):
            file.seek(i * _CHUNK_BYTES if is_small else i * (size - _CHUNK_BYTES) // (num_samples - 1))
            crc32 = zlib.crc32(file.read(_CHUNK_BYTES), crc32)
    return crc32
