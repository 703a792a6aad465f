"""Exports a model of a checkpoint as a transformers model, with the conversation template of the run."""

import shutil
from collections.abc import Callable
from pathlib import Path

from flowrl.checkpoints.checkpoints import Checkpoint
from flowrl.checkpoints.inputs import check_base_model
from flowrl.checkpoints.run_folder import RunFolder
from flowrl.config import ExportConfig, UserError
from flowrl.data.checksums import CheckpointError
from flowrl.data.folders.atomic_folder import rename_at_end, write_atomically
from flowrl.data.template import read_own_template
from flowrl.engines.checkpoint.export import adapter_base, export_adapter, export_model, roles_with_model
from flowrl.engines.checkpoint.model_folder import DEFAULT_EXPORT, check_is_new, copy_model
from flowrl.run.datasets.templates import save_template

Finish = Callable[[Path, str], None]
"""Adds files to the folder of an exported model, before the folder gets its name. Receives the folder and the role."""


def export_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    *,
    role: str | None = None,
    only_adapter: bool = False,
    config: ExportConfig = DEFAULT_EXPORT,
    finish: Finish = lambda folder, role: None,
) -> str:
    """Exports the model of a role to a new folder that transformers can load, and returns the role.

    Args:
        checkpoint: a complete checkpoint. Its checksums are verified first.
        output: a new folder, which is created atomically.
        role: role of the model. None: the actor, or the only role with a model.
        only_adapter: exports the adapter of a LoRA run for peft, instead of the model with the merged adapter.
        config: size of the files, and dtype of the weights. Not used with `only_adapter`.
        finish: adds files to the folder.
    Raises:
        CheckpointError: the checkpoint is corrupt, or the role has no model.
        ModelError: `output` exists, or the base model cannot be loaded.
        UserError: `output` cannot be written.
    """
    checkpoint.check()
    role = role or find_exported_role(checkpoint)
    if (base := adapter_base(checkpoint.role(role))) is not None:
        check_base_model(checkpoint, base, role)
    try:
        check_is_new(output)
        with rename_at_end(output) as folder:
            if only_adapter:
                export_adapter(checkpoint.role(role), folder)
            else:
                export_model(checkpoint.role(role), folder, config)
            save_template(read_own_template(checkpoint.path), folder)
            finish(folder, role)
    except OSError as error:
        if str(error.filename).startswith(str(output)):
            raise UserError(f"cannot write {output} ({error.strerror}): choose another folder with --output") from error
        # All other write errors have exceptions of their own, so this is a read error.
        reason = str(error).split("\n")[0]
        raise UserError(
            f"checkpoint {checkpoint.path} cannot be read ({reason}): choose another with --step"
        ) from error
    return role


def find_exported_role(checkpoint: Checkpoint) -> str:
    """Returns the actor, or else the only role with a model. Raises CheckpointError if there is none or several."""
    roles = roles_with_model(checkpoint.path)
    if "actor" in roles or len(roles) == 1:
        return "actor" if "actor" in roles else roles[0]
    if not roles:
        raise CheckpointError(f"checkpoint {checkpoint.path} has no role whose model can be exported")
    raise CheckpointError(f"checkpoint {checkpoint.path} has the models of {', '.join(roles)}: choose one with --role")


def export_saved_model(
    run_folder: Path,
    output: Path,
    role: str,
    *,
    config: ExportConfig | None = None,
    finish: Finish = lambda folder, role: None,
) -> None:
    """Copies the model that a run has saved in `model/` to a new folder, which is created atomically.

    Without `config`, the files stay as they are. The other arguments are those of `export_checkpoint`. Raises
    UserError if the run has no model, or if `output` exists or cannot be written.
    """
    source = RunFolder(run_folder).model
    if not (source / "config.json").is_file():
        raise UserError(
            f"run {run_folder} has neither a checkpoint nor a saved model: set checkpoint.every, or wait until the run "
            "ends"
        )
    if output.exists():
        raise UserError(f"{output} exists: choose a new folder with --output, or remove it")
    with write_atomically(output) as folder:
        if config is None:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        else:
            copy_model(source, folder, config)
        finish(folder, role)
