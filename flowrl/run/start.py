"""Starts a run: its display, the handling of signals, its folder, and its cluster."""

from contextlib import ExitStack
from dataclasses import dataclass

from flowrl.checkpoints.checkpoints import Checkpoint, Checkpoints
from flowrl.checkpoints.inputs import input_checksums
from flowrl.checkpoints.resume import find_checkpoint, is_resuming, warn_about_threads
from flowrl.checkpoints.run_folder import (
    RunFolder,
    folder_lock,
    log_to_file,
    remove_temporary_files,
    write_json,
)
from flowrl.checkpoints.saver import Saver
from flowrl.config import RolloutRunConfig, RunConfig, UserError
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.controller.backends.base import RAY_LOGGER
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.data.checksums import FileChecksum
from flowrl.data.prompts import PromptStream
from flowrl.data.template import ConversationTemplate, template_text
from flowrl.memory.device_settings import render_settings
from flowrl.report.progress import LiveProgress
from flowrl.run.checks.check_list import check_placement
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.datasets.templates import conversation_template
from flowrl.run.interrupt import Interruption
from flowrl.run.restarts import RestartPolicy, current_policy
from flowrl.schedules.replica_stream import make_rollout_source
from flowrl.schedules.rewards import Scoring
from flowrl.schedules.rollout_source import RolloutContext, RolloutSource
from flowrl.schedules.schedule_plan import trainer_routes
from flowrl.weight_sync.transfer import WeightSync


@dataclass
class StartedRun:
    """The parts of a run whose cluster is started."""

    config: RunConfig
    applied: RunConfig
    """The config with the values of null settings that depend on the devices."""
    folder: RunFolder
    cluster: Cluster
    resumed: Checkpoint | None
    """Checkpoint from which the run resumes."""
    inputs: dict[str, FileChecksum]
    """Checksums of the input files at the start. Checkpoints store them, because a user may edit the files during the
    run.
    """
    template: ConversationTemplate | None
    saver: Saver
    weight_sync: WeightSync
    progress: LiveProgress
    interruption: Interruption
    restarts: RestartPolicy

    def defer_signals(self, action: str, progress: str) -> None:
        """Makes the first signal end the run after the current step, because there are results to save."""
        self.interruption.defer(action, f"{progress} of {self.config.steps}; results: {self.folder.path}")

    def template_files(self) -> dict[str, bytes]:
        """Returns name -> content of the file of the conversation template, if the run has one."""
        return {} if self.template is None else {TEMPLATE_FILE: template_text(self.template).encode()}

    def report_resume(self, step: int) -> None:
        """Reports the step from which the run resumes."""
        self.progress.notify(f"resuming from step {step}")
        self.interruption.progress = f"after step {step} of {self.config.steps}; results: {self.folder.path}"

    def warn_about_threads(self) -> None:
        """Warns if a resumed run has other numbers of threads than before, which changes results."""
        if self.resumed is not None:
            warn_about_threads(self.config, self.resumed, self.cluster.count_threads(), self.progress.notify)


def start_run(config: RunConfig, resources: ExitStack) -> StartedRun:
    """Starts the cluster of a run, and opens its folder. `resources` closes both. `Run` documents the errors."""
    # Read now, because an invalid template would otherwise end the run when it saves the trained model.
    template = conversation_template(config)
    restarts = current_policy()
    checked = restarts.pop_checked(config)
    # Plans before the folder is locked, so that an impossible placement creates no files.
    if config.address is None:
        check_placement(checked)
    resources.enter_context(folder_lock(config.output))
    resumed = find_checkpoint(config)
    progress = resources.enter_context(LiveProgress(config.steps))
    interruption = resources.enter_context(Interruption(progress.notify))
    progress.notify(restarts.pop_message() or f"starting {', '.join(config.roles)} ({config.backend})")
    # Run after the cluster is closed, because workers may write until then.
    resources.callback(remove_temporary_files, config.output)
    resources.callback(Checkpoints(config.output).remove_unfinished)
    set_ray_log = resources.enter_context(log_to_file(RAY_LOGGER))
    cluster = resources.enter_context(restarts.cluster(config, lambda: _start_cluster(checked, progress), interruption))
    cluster.notify = progress.notify
    interruption.install()  # with `address`, Ray has installed its own handlers
    if (on_cluster := checked.replace(config, cluster.plan)) is not checked:
        checked = on_cluster
        check_placement(checked)
    progress.notify(render_settings(config, checked.applied, cluster.plan))
    applied = checked.applied.config
    resolved = config.model_dump(mode="json")
    folder = (RunFolder.reopen if is_resuming(config) else RunFolder.create)(config.output, resolved)
    set_ray_log(folder.ray_log)
    inputs = input_checksums(config)
    write_json(folder.inputs, {key: checksum._asdict() for key, checksum in inputs.items()})
    return StartedRun(
        config=config,
        applied=applied,
        folder=folder,
        cluster=cluster,
        resumed=resumed,
        inputs=inputs,
        template=template,
        saver=Saver(Checkpoints(config.output), config.checkpoint, config.compared_by),
        weight_sync=WeightSync(applied, cluster.plan),
        progress=progress,
        interruption=interruption,
        restarts=restarts,
    )


def _start_cluster(checked: CheckedRun, progress: LiveProgress) -> Cluster:
    config = checked.config
    return Cluster(
        config.placement,
        backend=config.backend,
        address=config.address,
        devices=config.devices,
        planned=checked.plan if config.address is None else None,
        roles=config.roles,
        dedicated=config.dedicated_roles(),
        num_threads=config.threads,
        prepare=("flowrl.run.advantages", "flowrl.workers"),
        fork_workers=config.fork_workers,
        call_timeout_s=config.call_timeout_s,
        start_timeout_s=config.start_timeout_s,
        deterministic=config.deterministic,
        notify=progress.notify,
    )


def _check_selection(config: RolloutRunConfig) -> None:
    """Raises UserError if rows or prompts are selected by scores that `run.rollouts` does not compute."""
    order = "data.order: curriculum" if config.data.order == "curriculum" else "data.difficulty"
    settings = {
        "dynamic_sampling": config.dynamic_sampling is not None,
        order: config.data.needs_success,
        "on_failure: drop": config.on_failure == "drop",
    }
    if wrong := [name for name, is_set in settings.items() if is_set]:
        raise UserError(
            f"{wrong[0]} is set, but the recipe calls run.rollouts without a reward, so that it selects nothing by "
            f"scores: pass reward=run.rewards() in the recipe, or remove {wrong[0]}"
        )


def make_source(
    started: StartedRun, rollout: WorkerGroup, prompts: PromptStream, reward: Scoring | None
) -> RolloutSource:
    """Returns the source of the batches of `Run.rollouts`.

    Raises UserError if the config has no rollout, or if it selects rows or prompts by scores and `reward` is None.
    """
    config = started.applied
    if not isinstance(config, RolloutRunConfig):
        raise UserError(
            f"run.rollouts needs the settings of RolloutRunConfig, but {type(config).__name__} is no subclass: derive "
            "it from RolloutRunConfig, or iterate over run.batches and call rollout.generate"
        )
    if reward is None:
        _check_selection(config)
    routes = trainer_routes(config, started.cluster.plan)
    calls, notify = started.cluster.calls, started.progress.notify
    return make_rollout_source(
        RolloutContext(config, rollout, prompts, started.weight_sync, calls, notify, reward, routes)
    )
