"""Writes the model card of an exported model: recipe, settings, checksums of the data, curves and evaluation.

The folder has the layout of a model repository on the Hugging Face Hub. `README.md` begins with metadata. `training/`
has the files of the run.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_files import Record, read_config, read_inputs, read_metrics, read_summary, read_system
from flowrl.checkpoints.run_folder import RunFolder
from flowrl.checkpoints.system_info import SYSTEM_FILE
from flowrl.config.source import parse, parse_json, read_text
from flowrl.data.folders.input_paths import find_model_file, is_hub_name
from flowrl.data.metric import finite
from flowrl.health import read_findings
from flowrl.health.monitor import FILE
from flowrl.report.page.run_data import evaluations
from flowrl.report.plots import draw_curves
from flowrl.report.rollout_log import RolloutLogError, read_rows, saved_steps
from flowrl.report.value_diff import flatten_settings

TRAINING = "training"
"""Folder of the run's files in an exported model."""

_SETTINGS = ("steps", "batch_size", "samples_per_prompt", "epochs", "seed", "algorithm.estimator", "actor.loss.kind",
             "actor.optimizer.lr", "actor.optimizer.schedule", "actor.kl_loss_coef", "algorithm.kl_coef",
             "rollout.max_response_tokens", "rollout.temperature", "schedule.kind", "actor.lora.rank")  # fmt: skip
"""Settings that the card shows. `training/config.yaml` has all settings."""

_SET_METRICS = ("accuracy", "validation_loss", "agreement")
"""Metrics that each evaluation set has. For the set NAME, they end with `/NAME`."""


def write_model_card(folder: Path, run_folder: Path, *, step: int, role: str, is_adapter: bool) -> None:
    """Writes `README.md` and `training/` into the folder of an exported model.

    Args:
        folder: exported model or adapter.
        run_folder: run that trained the model.
        step: step of the weights.
        role: role of the model in the run.
        is_adapter: whether the folder has only an adapter.
    Raises:
        UserError: a file of the run is corrupt.
    """
    run, settings = RunFolder(run_folder), read_config(run_folder)
    records = [record for record in read_metrics(run.metrics) if record["step"] <= step]
    files = folder / TRAINING
    files.mkdir()
    (files / "config.yaml").write_bytes(run.config.read_bytes())
    (files / "metrics.jsonl").write_text("".join(json.dumps(finite(record)) + "\n" for record in records))
    if run.inputs.is_file():
        (files / run.inputs.name).write_bytes(run.inputs.read_bytes())
    if (system := read_system(run_folder)) is not None:  # without the command line, which may contain secrets
        shared = {name: system[name] for name in ("versions", "machine") if name in system}
        (files / SYSTEM_FILE).write_text(json.dumps(shared, indent=2))
    has_curves = any(record["step"] for record in records)
    if has_curves:
        draw_curves(records, files / "curves.png")
    (folder / "README.md").write_text(
        render_card(settings, records, run_folder, step=step, role=role, is_adapter=is_adapter, has_curves=has_curves),
        encoding="utf-8",
    )


def render_card(
    settings: Mapping[str, Any],  # Any: values of settings
    records: Sequence[Record],
    run_folder: Path,
    *,
    step: int,
    role: str,
    is_adapter: bool,
    has_curves: bool,
) -> str:
    """Returns the text of a model card. `records` are the metrics up to the step of the weights."""
    base = (settings.get(role) or {}).get("model", {}).get("path")
    license_of_base = {} if base is None else _read_license(Path(base))
    recipe = settings.get("recipe") or "a recipe of its own"
    content = "adapter" if is_adapter else "model"
    lines = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        *([f"base_model: {json.dumps(base)}"] if base is not None and is_hub_name(Path(base)) else []),
        *(f"{key}: {json.dumps(value)}" for key, value in license_of_base.items()),
        *(["pipeline_tag: text-generation"] if role == "actor" else []),
        "tags: [flowrl]",
        "---",
        "",
        f"# {run_folder.resolve().name}",
        "",
        f"This {content} is the {role} of a flowrl run after step {step}. The recipe is `{recipe}`."
        + ("" if base is None else f" Training started from the base model `{base}`.")
        + (f" Its license is {_quoted(license_of_base['license'])}." if license_of_base else ""),
        "",
    ]
    lines += _evaluation_lines(records, run_folder, step)
    if has_curves:
        lines += ["## Training", "", f"![Metrics of the run]({TRAINING}/curves.png)", ""]
    flat = flatten_settings(settings)
    rows = [(name, flat[name]) for name in _SETTINGS if flat.get(name) is not None]
    lines += _table(("setting", "value"), [(f"`{name}`", f"`{value}`") for name, value in rows])
    lines += _data_lines(run_folder, flat) + _finding_lines(run_folder, step) + _version_lines(run_folder)
    module = str(recipe).partition(":")[0].removesuffix(".config")
    lines += [
        "## Repeat the run",
        "",
        f"`{TRAINING}/config.yaml` has all settings, and `{TRAINING}/metrics.jsonl` the metrics of each step. The "
        "paths of models and data are those of the machine that trained the model.",
        "",
        "```bash",
        f"python -m {module}.train {TRAINING}/config.yaml output=NEW_FOLDER",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _read_license(base: Path) -> dict[str, str | list[str]]:
    """Returns the license in the metadata of a base model: `license`, and its name and URL if they are given.

    Reads `README.md` and `config.json` of a local folder, or of the cache of the Hub. Returns an empty dict if neither
    file states a license.
    """
    for name in ("README.md", "config.json"):
        path = find_model_file(base, name)
        if path is None:
            continue
        try:
            metadata = _read_metadata(path)
        except (OSError, ValueError):  # for example, metadata that the Hub rejects too
            continue
        if not isinstance(metadata, dict) or not (value := metadata.get("license")):
            continue
        if not all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
            continue
        license_of_base, link = {"license": value}, metadata.get("license_link")
        if isinstance(license_name := metadata.get("license_name"), str):
            license_of_base["license_name"] = license_name
        # A relative link names a file of the base model, which the exported model does not have.
        if isinstance(link, str) and link.startswith("http"):
            license_of_base["license_link"] = link
        return license_of_base
    return {}


def _read_metadata(path: Path) -> Any:  # Any: a value of YAML or JSON
    """Returns the content of a JSON file, or the YAML at the start of a Markdown file. None for Markdown without YAML.

    Raises OSError or ValueError.
    """
    text = read_text(path).removeprefix("\ufeff")
    if path.suffix == ".json":
        return parse_json(text)
    header = re.match(r"---\s*\n(.*?)\n---\s*$", text, re.DOTALL | re.MULTILINE)
    return None if header is None else parse(header[1], str(path), numbered=False)[0]


def _quoted(value: str | Sequence[str]) -> str:
    return f"`{value}`" if isinstance(value, str) else ", ".join(f"`{item}`" for item in value)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [heading, ["---"] * len(heading), *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""] if rows else []


def _evaluation_lines(records: Sequence[Record], run_folder: Path, step: int) -> list[str]:
    results = evaluations(records)
    rows = []
    for result in results:
        values = [
            f"{result[when]:.4g}" + (f" ({interval[0]:.4g} to {interval[1]:.4g})" if interval else "")
            for when, interval in (("first", result["first_interval"]), ("last", result["last_interval"]))
        ]
        steps = (
            f"{value} (step {result[f'{when}_step']})" for value, when in zip(values, ("first", "last"), strict=True)
        )
        rows.append((f"`{result['name']}`", *steps))
    table = _table(("metric", "first evaluation", "last evaluation"), rows)
    note = ["Intervals are 95 % bootstrap intervals over prompts.", ""] if any(" to " in row[2] for row in rows) else []
    sizes = _size_lines(run_folder, step, [result["name"] for result in results])
    return ["## Evaluation on held-out data", "", *table, *note, *sizes] if rows else []


def _size_lines(run_folder: Path, step: int, metrics: Sequence[str]) -> list[str]:
    """Returns lines with the sizes of the evaluation sets in the saved rows, or else with the total in `summary.json`.

    `metrics` are the names of the metrics of all evaluations. They contain the names of the sets.
    """
    folder = RunFolder(run_folder).rollouts
    sets = {name.partition("/")[2] for name in metrics if name.partition("/")[0] in _SET_METRICS}
    sizes: dict[str, tuple[int, int]] = {}
    for saved in reversed([saved for saved in saved_steps(folder, "evaluation") if saved <= step]):
        if sizes.keys() >= sets:  # sets may be evaluated in different steps
            break
        prompts: defaultdict[str, list[int]] = defaultdict(list)
        try:
            for row in read_rows(folder, "evaluation", saved):
                prompts[row["set"] or ""].append(row["prompt_id"])
        except RolloutLogError:  # a card needs no rows
            continue
        for name, ids in prompts.items():
            sizes.setdefault(name, (len(set(ids)), len(ids)))
    if sizes:
        rows = [
            (f"`data.tests.{name}`" if name else "`data.test`", f"{num_prompts:,}", f"{num_responses:,}")
            for name, (num_prompts, num_responses) in sizes.items()
        ]
        return _table(("evaluation set", "prompts", "responses"), rows)
    num_rows = (read_summary(run_folder) or {}).get("evaluation_rows")
    return [f"The last evaluation of the run used {num_rows:,} rows.", ""] if num_rows else []


def _data_lines(run_folder: Path, settings: Mapping[str, Any]) -> list[str]:
    inputs = read_inputs(run_folder) or {}
    rows = [
        (f"`{name}`", f"`{settings.get(name.partition(' (')[0], '')}`", f"{value['size']:,}", f"{value['crc32']:08x}")
        for name, value in inputs.items()
    ]
    return ["## Data and other inputs", "", *_table(("setting", "value", "bytes", "CRC-32"), rows)] if rows else []


def _finding_lines(run_folder: Path, step: int) -> list[str]:
    if not (run_folder / FILE).is_file():
        return []
    findings = [finding for finding in read_findings(run_folder) if finding.step <= step]
    if not findings:
        return ["## Health checks", "", "The health checks of the run found no problem.", ""]
    rows = [(f"`{finding.check}`", str(finding.step), finding.message) for finding in findings]
    return ["## Health checks", "", *_table(("check", "step", "finding"), rows)]


def _version_lines(run_folder: Path) -> list[str]:
    system = read_system(run_folder)
    if system is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in system["versions"].items())
    return ["## Software", "", f"{versions}.", ""]


def saved_step(run_folder: Path) -> int:
    """Returns the step of the model that a run has saved in `model/`: the last step in its metrics."""
    records = read_metrics(RunFolder(run_folder).metrics)
    return int(records[-1]["step"]) if records else 0


def saved_role(run_folder: Path) -> str:
    """Returns the role of the model that a run has saved in `model/`: the actor, or the only trained role."""
    settings = read_config(run_folder)
    trained = [name for name, value in settings.items() if isinstance(value, Mapping) and "optimizer" in value]
    return "actor" if "actor" in trained or len(trained) != 1 else trained[0]
