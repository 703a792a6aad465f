"""Runs all stages in order, and skips finished stages."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flowrl.checkpoints.resume import RunComplete
from flowrl.checkpoints.run_folder import LOCK, RunFolderError, folder_lock, write_json
from flowrl.config import RunConfig, import_function
from flowrl.data.console import make_console
from flowrl.run.checks.check_list import check_start
from flowrl.run.restarts import with_restarts
from recipes.pipeline.comparison import compare, draw_comparison, render_markdown, render_table
from recipes.pipeline.config import POLICIES, PPO_STAGES, STAGES, PipelineConfig
from recipes.pipeline.prepare import prepare
from recipes.pipeline.sampling import measure, measure_checkpoints, write_pairs

SETTINGS = "pipeline.json"


def run_pipeline(pipeline: PipelineConfig, configs: Mapping[str, RunConfig]) -> None:
    """Runs all stages and writes `summary.json`, `comparison.md` and `comparison.png` to the output folder."""
    output, console = pipeline.output, make_console()
    with folder_lock(output):
        settings = {name: config.model_dump(mode="json") for name, config in configs.items()}
        check_folder(output, pipeline.model_dump(mode="json") | settings)
        clock = Clock(output / "seconds.json")
        with clock.stage("prepare"):
            prepare(pipeline)
        for name, config in configs.items():
            if name == "reward_model":
                with clock.stage("pairs"):
                    write_pairs(pipeline)
            console.print(f"stage {name}", style="bold")
            with clock.stage(name):
                train(name, config)
        with clock.stage("comparison"):
            measures = {policy: measure(pipeline, policy) for policy in POLICIES}
            checkpoints = {name: measure_checkpoints(pipeline, name) for name in PPO_STAGES}
        summary = compare(pipeline, measures, checkpoints) | {"seconds": clock.seconds}
        write_json(output / "summary.json", summary)
        draw_comparison(output, summary)
        (output / "comparison.md").write_text(render_markdown(summary, measures), encoding="utf-8")
        console.print(render_table(summary))
        console.print(f"{output}/comparison.png, comparison.md, summary.json")


def train(stage: str, config: RunConfig) -> None:
    """Runs the recipe of a stage. An interrupted stage resumes from its newest checkpoint.

    A finished stage is skipped.
    """
    try:
        checked = check_start(config)
        with_restarts(import_function(STAGES[stage].train), config, checked)
    except RunComplete:
        return


def check_folder(output: Path, settings: dict) -> None:
    """Writes the settings of all stages into a new output folder.

    Raises RunFolderError if the folder has results of other settings or other files.
    """
    path = output / SETTINGS
    if path.exists():
        old = _flatten(json.loads(path.read_text(encoding="utf-8")))
        new = _flatten(settings)
        changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
        if changed:
            raise RunFolderError(
                f"output folder {output} has results with {changed[0]} {old.get(changed[0])}, but it is "
                f"{new.get(changed[0])} now: restore the setting, or set output to a new folder"
            )
        return
    others = [entry.name for entry in output.iterdir() if entry.name != LOCK]
    if others:
        raise RunFolderError(
            f"output folder {output} is not empty (it has {others[0]}) and has no {SETTINGS}: set output to a new "
            "folder"
        )
    write_json(path, settings)


def _flatten(settings: dict, prefix: str = "") -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in settings.items():
        key = f"{prefix}.{name}" if prefix else name
        values |= _flatten(value, key) if isinstance(value, dict) else {key: value}
    return values


class Clock:
    """Measures the total seconds of each stage over all starts of the program."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to the seconds of the stage."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started_s, 1)
            write_json(self._path, self.seconds)
