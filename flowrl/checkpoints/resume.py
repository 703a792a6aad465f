"""Finds the checkpoint from which a run resumes. Rejects changes of settings or inputs that would change results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flowrl.checkpoints.checkpoints import ROWS_FORMAT, Checkpoint, Checkpoints
from flowrl.checkpoints.inputs import check_same_inputs
from flowrl.checkpoints.run_folder import RunFolder, RunFolderError
from flowrl.config import ConfigError, RolloutRunConfig, RunConfig, load_recorded
from flowrl.config.source import read, read_json
from flowrl.data.checksums import CheckpointError

MAY_DIFFER = (
    "output",
    "resume",
    "checkpoint.*",
    "export.*",
    "report.*",
    "health.*",
    "record",
    "restarts",
    "backend",
    "address",
    "placement.*",
    "devices",
    "threads",
    "fork_workers",
    "call_timeout_s",
    "start_timeout_s",
    "steps",
    "epochs",
    "evaluate_every",
    "schedule.concurrent_evaluation",
    "data.tests.*.every",
    "rollout.max_num_seqs",
    "*engine.strategy",
    "*engine.shard_ranks",
    "*engine.reshard_after_forward",
    "*engine.expert_parallel",
    "*engine.offload",
    "*engine.gradient_checkpointing",
    "*engine.offload_activations",
    "*engine.sequence_parallel_norms",
    "*engine.overlap_all_reduce",
    "*engine.packing",
    "*engine.max_tokens_per_microbatch",
)
"""Patterns of settings that may change on resume."""

_MISSING = object()


class RunComplete(Exception):
    """Raised on resume if all steps of the run are trained. The program then ends with exit code 0."""


def is_resuming(config: RunConfig) -> bool:
    """Returns whether the run continues an earlier run in its output folder.

    Raises RunFolderError if the settings differ, and RunComplete if no step is left.
    """
    folder = RunFolder(config.output)
    if config.resume == "never" or not folder.config.exists():
        return False
    old_steps = _check_same_settings(config, folder.config)
    steps = Checkpoints(config.output).steps()
    if not config.is_length_known(dict(config)):
        return True  # Checked again when the run has read its data.
    if old_steps == config.steps and _has_complete_summary(folder, config.steps, steps):
        raise RunComplete(
            f"the run in {config.output} is already complete ({config.steps} steps), so there is nothing to do: "
            f"increase {_length_settings(config)} to continue it"
        )
    if not steps and (folder.summary.exists() or folder.model.exists()):
        # Starting over would delete a model, which may be all that is left of a failed run.
        raise RunFolderError(
            f"output folder {config.output} has a trained model without a checkpoint to resume from: set output to a "
            f"new folder, or remove it"
        )
    if steps and steps[-1] > config.steps:
        raise RunFolderError(
            f"this run has {config.steps} steps, but the run in {config.output} is at step {steps[-1]}: increase "
            f"{_length_settings(config)}, so that it has at least {steps[-1]} steps"
        )
    return True


def _has_complete_summary(folder: RunFolder, num_steps: int, checkpoints: Sequence[int]) -> bool:
    """Returns whether a run of `num_steps` steps wrote its results after its last step. `checkpoints` are the saved
    steps.
    """
    try:
        summary = read_json(folder.summary)
        has_ended_early = summary["interrupted_by"] is not None or summary.get("stopped_by") is not None
        is_complete = summary["steps_requested"] == num_steps and not has_ended_early
        return is_complete and (not checkpoints or checkpoints[-1] == summary["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_checkpoint(config: RunConfig) -> Checkpoint | None:
    """Returns the verified checkpoint from which the run resumes, or None if the run starts from step 0.

    Removes incomplete saves. Raises RunFolderError if settings or inputs have changed, RunComplete if no step is left,
    and CheckpointError if the newest checkpoint is corrupt or lacks the pending rollouts.
    """
    if not is_resuming(config):
        return None
    checkpoints = Checkpoints(config.output)
    newest = checkpoints.newest()
    checkpoints.remove_unfinished()
    if newest is None:
        return None
    if isinstance(config, RolloutRunConfig) and newest.manifest.format < ROWS_FORMAT:
        raise CheckpointError(
            f"checkpoint {newest.path} has format {newest.manifest.format}, which lacks pending rollouts: resume with "
            f"the version of flowrl that wrote it, or set output to a new folder"
        )
    _check_pending_rollouts(config, newest)
    check_same_inputs(newest.driver().get("inputs", {}), config)
    return newest


def _check_pending_rollouts(config: RunConfig, newest: Checkpoint) -> None:
    """Raises CheckpointError if a checkpoint of `one_step_off` lacks the pending rollouts of the next step.

    Versions of flowrl that write format 2 save no responses after the last step. A run that ended because of a failed
    reward also saves no responses, but generates them again on resume.
    """
    if not isinstance(config, RolloutRunConfig) or config.schedule.is_streaming or not config.schedule.staleness:
        return
    step, state = newest.manifest.step, newest.driver()
    is_requeued = state.get("objects", {}).get("prompts", {}).get("is_requeued", False)
    if step < config.steps and state["rows"] is None and not is_requeued:
        raise CheckpointError(
            f"steps is {config.steps}, but checkpoint {newest.path} was the end of a run and lacks the pending "
            f"rollouts of step {step + 1}, so a {config.schedule.kind} run cannot continue from it: set steps to "
            f"{step}, or set output to a new folder"
        )


def warn_about_threads(
    config: RunConfig, checkpoint: Checkpoint, threads: Mapping[str, int], notify: Callable[[str], None]
) -> None:
    """Shows a message if a role has another number of threads than before the checkpoint, which changes rounding.

    `threads` maps each role to its current number. If the setting `threads` is not null, there is no message, because
    the change is deliberate.
    """
    before = checkpoint.driver().get("threads", {})
    changed = {role: count for role, count in threads.items() if before.get(role, count) != count}
    if config.threads is not None or not changed:
        return
    counts = ", ".join(f"{role} {before[role]}, now {count}" for role, count in changed.items())
    kept = {before[role] for role in changed}
    remedy = f"threads={kept.pop()} keeps the number" if len(kept) == 1 else "set threads to choose the number"
    notify(
        f"the number of torch CPU threads per process has changed ({counts}), so results may differ in the last bits "
        f"from those of an uninterrupted run: {remedy}"
    )


# Settings.


def _check_same_settings(config: RunConfig, path: Path) -> int:
    """Returns the `steps` of the earlier run's `config.yaml`.

    Raises RunFolderError if a setting outside `MAY_DIFFER` differs.
    """
    try:
        # Checked first, because most settings of another recipe differ or are unknown.
        recipe = read(path).values.get("recipe")
        if recipe is not None and config.recipe is not None and recipe != config.recipe:
            raise RunFolderError(
                f"recipe was {recipe} in the run in {path.parent} and is now {config.recipe}, so this run cannot be "
                f"resumed: set output to a new folder"
            )
        # Validation adds the default of every setting that did not exist when the earlier run started.
        earlier = load_recorded(path, type(config))
    except ConfigError as error:
        raise RunFolderError(
            f"the settings of the run in {path.parent} are not a valid {type(config).__name__}, so this run cannot be "
            f"resumed: correct them, or set output to a new folder\n  {error}"
        ) from error
    # A run of unknown length is checked again after it has read its data.
    may_differ = MAY_DIFFER if config.is_length_known(dict(config)) else (*MAY_DIFFER, "*optimizer.total_steps")
    different = [
        (key, before, now)
        for key, before, now in differences(earlier.model_dump(mode="json"), config.model_dump(mode="json"))
        if not any(fnmatchcase(key, pattern) for pattern in may_differ)
    ]
    changed = [
        f"{key} was {_format(before)} in the run in {path.parent} and is now {_format(now)}"
        for key, before, now in different
    ]
    if changed and all(fnmatchcase(key, "*optimizer.total_steps") and before for key, before, _ in different):
        # Usually follows from the length of the run, so that the user has not set it.
        kept = " ".join(f"{key}={before}" for key, before, _ in different)
        raise RunFolderError(
            f"{'; '.join(changed)}, which would change the learning rate: restore the old "
            f"{_length_settings(config)}, set {kept} (the learning rate then stays at its minimum in later updates), "
            f"or set output to a new folder"
        )
    if changed:
        values = "value" if len(changed) == 1 else "values"
        raise RunFolderError(
            f"{'; '.join(changed)}, which would change results; restore the old {values}, or set output to a new folder"
        )
    return earlier.steps


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old value, new value) of every setting that differs, in the order of the new config."""
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(name, _MISSING), new.get(name, _MISSING)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield prefix + name, before, now


def _length_settings(config: RunConfig) -> str:
    return " or ".join(config.LENGTH_SETTINGS)


def _format(value: object) -> str:
    return "not set" if value is _MISSING else "null" if value is None else str(value)
