"""The files that a run reads at each start and no checkpoint holds: data, and models that stay as they are."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.checkpoints.checkpoints import Checkpoint
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import ActorConfig, CriticConfig, DataConfig, RunConfig, models_of
from flowrl.data.checksums import FileChecksum

_WHOLE = 256 * 1024**2
"""Bytes up to which a model's file is summed whole, in a tenth of a second (flowrl/data/checksums.py)."""

_PIECE = 1024**2
"""Of a larger file so many bytes are summed at each of `_WHOLE / _PIECE` even places, its beginning and end among
them: the headers of weights, and enough of these that a model which was trained again has another sum."""


def input_checksums(config: RunConfig) -> dict[str, FileChecksum]:
    """Dotted key of a path in the config -> sum of what lies there. What cannot be read, such as a hub name, has none.

    A model that is trained as a whole is not among them: its weights are those of the checkpoint.
    """
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
    found = {key: _sum_of_all(paths) for key, paths in files.items() if paths}
    return {key: file for key, file in found.items() if file is not None}


def refuse_changed_inputs(old: Mapping[str, Sequence[int]], config: RunConfig, checkpoint: Checkpoint) -> None:
    """Refuses a run that would go on with other data, or beside another model, than it had. Raises RunFolderError.

    Args:
        old: what `input_checksums` gave when the checkpoint was saved.
    """
    for key, now in input_checksums(config).items():
        before = FileChecksum(*old[key]) if key in old else now
        if before != now:
            raise RunFolderError(
                f"what lies at {key} is not what the run in {config.output} had at step {checkpoint.manifest.step} "
                f"({_difference(before, now)}), which changes its numbers: put it back, or set output to a new folder"
            )


def refuse_changed_base(checkpoint: Checkpoint, base: Path) -> None:
    """Refuses to put an adapter of a checkpoint onto another model than it was trained on. Raises RunFolderError.

    Args:
        base: where that model was.
    """
    old = checkpoint.driver().get("inputs", {})
    before = next((FileChecksum(*old[key]) for key in ("actor.model.path", "model.path") if key in old), None)
    if before is None:  # a hub name, or a checkpoint from before sums were kept
        return
    now = _sum_of_all(sorted(base.glob("*.safetensors")))
    if not base.is_dir() or now != before:
        why = _difference(before, now) if base.is_dir() and now is not None else "it is not there"
        raise RunFolderError(
            f"the adapter of step {checkpoint.manifest.step} was trained on the model in {base}, which is another one "
            f"now ({why}): put back the one that the run began with"
        )


def _difference(before: FileChecksum, now: FileChecksum) -> str:
    same_size = before.size == now.size
    return "other contents of the same size" if same_size else f"{now.size:,} bytes, then {before.size:,}"


def _sum_of_all(paths: Sequence[Path]) -> FileChecksum | None:
    """Of files one after another; None where one cannot be read."""
    size = crc32 = 0
    try:
        for path in paths:
            size += path.stat().st_size
            crc32 = _sum(path, crc32)
    except OSError:
        return None
    return FileChecksum(size, crc32)


def _sum(path: Path, crc32: int) -> int:
    """The CRC-32 of a file, of a large one in pieces, after that of others."""
    size, places = path.stat().st_size, _WHOLE // _PIECE
    whole = size <= _WHOLE
    with path.open("rb") as file:
        for place in range(-(-size // _PIECE) if whole else places):
            file.seek(place * _PIECE if whole else place * (size - _PIECE) // (places - 1))
            crc32 = zlib.crc32(file.read(_PIECE), crc32)
    return crc32
