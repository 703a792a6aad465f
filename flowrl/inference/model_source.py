"""Finds the model that a command uses: a model, a run, a checkpoint or an adapter, as a folder for transformers."""

import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.checkpoints.checkpoints import MANIFEST, Checkpoint, Checkpoints, read_checkpoint
from flowrl.config import ADAPTER_SETTINGS, ModelConfig, UserError, read_base_model
from flowrl.config.source import read
from flowrl.data.folders.input_paths import find_model_problem
from flowrl.data.folders.private_folder import PrivateFolder, create_folder, remove_abandoned_folders

_KIND = "model"
"""Part of the name of temporary folders."""

_logger = logging.getLogger(__name__)


class ModelSourceError(UserError):
    """Raised if there is no model that can be used at the given path."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is ready to be loaded."""

    path: Path
    """Folder of `save_pretrained`, or a Hub name. The weights of an adapter are merged into this model."""
    tokenizer: Path | None
    """Folder of the tokenizer; None is the folder of the model."""
    adapter: Path | None
    """Folder of the adapter that was merged into the model, or None."""
    name: str
    """Name in tables: the name of the folder, and for a checkpoint RUN/step-N."""
    kind: Literal["model", "run", "checkpoint"]
    folders: tuple[PrivateFolder, ...] = ()
    """Temporary folders of the model and its tokenizer."""
    max_response_tokens: int | None = None
    """`rollout.max_response_tokens` of the run; None if the model has no run, or a run without rollouts."""

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer."""
        return self.path if self.tokenizer is None else self.tokenizer

    def model_config(self, dtype: Literal["float32", "bfloat16", "float64"] = "float32") -> ModelConfig:
        """Returns the settings with which a role loads the model. They disable dropout."""
        return ModelConfig(path=self.path, tokenizer=self.tokenizer, dtype=dtype, dropout=0)


def resolve_model(source: str, *, step: int | None = None, adapter: str | None = None) -> ModelSource:
    """Returns the model of a model folder, a Hub name, a run folder, a checkpoint folder or an adapter folder.

    Exports a checkpoint, and saves a model with a merged adapter, to a temporary folder. The folder is deleted when the
    process exits. Also deletes the temporary folders of killed processes.

    Args:
        source: a run folder stands for its `model/`, or for its newest checkpoint if the run has not saved a model.
        step: selects a checkpoint of a run.
        adapter: folder of a LoRA adapter in the format of peft, which is merged into the model.
    Raises:
        ModelSourceError: there is no model at `source`, or `step` does not apply.
        CheckpointError: the checkpoint is missing or corrupt.
        ModelError: a model cannot be loaded to merge the adapter.
        LoraError: the adapter does not match the model.
    """
    path = Path(source)
    is_run = path.is_dir() and (path / "config.yaml").is_file()
    if step is not None and not is_run:
        raise ModelSourceError(
            f"step is {step}, which selects a checkpoint of a run, but {source} is not a run folder: omit it, or pass "
            f"the run folder"
        )
    if is_run:
        model = _resolve_run(path, step)
    elif path.is_dir() and (path / MANIFEST).is_file() and not (path / "config.json").is_file():
        model = _resolve_checkpoint(read_checkpoint(path), "checkpoint")
    elif path.is_dir() and (path / ADAPTER_SETTINGS).is_file() and not (path / "config.json").is_file():
        model = _merge_adapter(_resolve_model(_read_base(path)), path)
    else:
        model = _resolve_model(source)
    if adapter is not None:
        model = _merge_adapter(model, Path(adapter))
    if not model.folders:  # otherwise, `create_folder` has deleted them
        remove_abandoned_folders(Path(tempfile.gettempdir()))
    return model


def check_model(source: str) -> None:
    """Raises ModelSourceError unless `source` is a model, a run, a checkpoint or an adapter. Loads no weights."""
    path = Path(source)
    if not any((path / name).is_file() for name in ("config.yaml", MANIFEST, ADAPTER_SETTINGS)):
        _resolve_model(source)


def _response_limit(run: Path) -> int | None:
    """Returns `rollout.max_response_tokens` of a run folder, or None if the run has no such setting."""
    path = run / "config.yaml"
    rollout = read(path).values.get("rollout") if path.is_file() else None
    limit = rollout.get("max_response_tokens") if isinstance(rollout, dict) else None
    return limit if isinstance(limit, int) else None


def _resolve_run(path: Path, step: int | None) -> ModelSource:
    model = path / "model"
    if step is None and (model / "config.json").is_file():
        name = path.resolve().name
        return ModelSource(model, None, None, name, "run", max_response_tokens=_response_limit(path))
    checkpoints = Checkpoints(path)
    if step is None and not (steps := checkpoints.steps()):
        raise ModelSourceError(
            f"run {path} has neither a saved model nor a checkpoint: wait until it has saved one (checkpoint.every=N), "
            f"or choose another run"
        )
    return _resolve_checkpoint(checkpoints.read(steps[-1] if step is None else step), "run")


def _resolve_checkpoint(checkpoint: Checkpoint, kind: Literal["run", "checkpoint"]) -> ModelSource:
    from flowrl.inference.checkpoint_export import export_checkpoint  # noqa: PLC0415 (torch, only for a checkpoint)

    temporary = create_folder(_KIND)
    path = temporary.path / checkpoint.path.name
    _logger.info("exporting checkpoint %s to %s", checkpoint.path, path)
    export_checkpoint(checkpoint, path)
    folder = checkpoint.path.resolve()
    name = f"{folder.parents[1].name}/{folder.name}"
    limit = _response_limit(folder.parents[1])
    return ModelSource(path, None, None, name, kind, (temporary,), limit)


def _resolve_model(source: str) -> ModelSource:
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        if re.fullmatch(r"step-\d{6,}", path.name):
            raise ModelSourceError(f"checkpoint {path} is incomplete (it has no {MANIFEST}): choose another step")
        raise ModelSourceError(
            f"{path} has no model: pass a folder with config.json (a model), config.yaml (a run), {MANIFEST} (a "
            f"checkpoint) or {ADAPTER_SETTINGS} (an adapter)"
        )
    if problem := find_model_problem(path):
        raise ModelSourceError(f"no model can be loaded from {source}: {problem}")
    name = path.resolve().name if path.is_dir() else source
    return ModelSource(path, None, None, name, "model")


def _read_base(adapter: Path) -> str:
    """Returns the base model of an adapter. Raises ModelSourceError if the adapter does not name one."""
    try:
        return read_base_model(adapter)
    except ValueError as error:
        raise ModelSourceError(f"{error}, with --adapter") from error


def _merge_adapter(source: ModelSource, adapter: Path) -> ModelSource:
    """Returns the model with the weights of an adapter, in a temporary folder."""
    if not (adapter / ADAPTER_SETTINGS).is_file():
        raise ModelSourceError(
            f"adapter {adapter} has no {ADAPTER_SETTINGS}: pass a folder in the format of peft, such as the output "
            f"of `flowrl export --adapter`"
        )
    # imported here, because models without an adapter do not need torch
    from flowrl.engines.checkpoint.model_folder import save_model  # noqa: PLC0415
    from flowrl.engines.models.adapters.lora import merge_adapter  # noqa: PLC0415
    from flowrl.engines.models.loading import load_policy, stored_dtype  # noqa: PLC0415

    temporary = create_folder(_KIND)
    path = temporary.path / adapter.resolve().name
    model = merge_adapter(load_policy(source.model_config(stored_dtype(source.path))), adapter)
    save_model(model, source.tokenizer_path, path)
    name = f"{source.name}+{adapter.resolve().name}"
    folders = (*source.folders, temporary)
    limit = source.max_response_tokens
    return ModelSource(path, source.tokenizer_path, adapter, name, source.kind, folders, limit)
