"""Writes the HTML report of runs: one file with all data, styles and scripts."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from flowrl.checkpoints.run_files import read_config, read_metrics, read_summary
from flowrl.checkpoints.run_folder import RunFolder, is_disk_full, replacing
from flowrl.config import UserError
from flowrl.data.metric import finite
from flowrl.report.chrome_trace import read_trace
from flowrl.report.page.completion_data import completion_data
from flowrl.report.page.curve_data import curve_data
from flowrl.report.page.run_data import find_profiles, run_data, unique_names
from flowrl.report.page.timeline_data import timeline_data
from flowrl.report.rollout_log import Kind, saved_steps
from flowrl.report.value_diff import compare_settings

DEFAULT_NAME = "report.html"


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the report of one or several runs, and returns its path.

    Args:
        folders: output folders of runs. Their order determines the colors of the runs.
        output: HTML file. None selects `report.html` in the folder of the run, or in the working folder for several
            runs.
    Raises:
        UserError: a folder is not a run folder, a file of a run is corrupt, or the output cannot be written. No file is
            written in these cases.
    """
    names = unique_names(folders)
    path = _output_path(folders, output)
    configs = [read_config(folder) for folder in folders]
    parts: dict[str, Any] = {}
    runs = []
    for i, (folder, name, config) in enumerate(zip(folders, names, configs, strict=True)):
        run, run_parts = _collect(folder, name, config)
        run["profiles"] = find_profiles(folder, path.parent)
        runs.append(run)
        parts |= {f"{part}-{i}": value for part, value in run_parts.items()}
    head = {
        "created": datetime.now().astimezone().isoformat(timespec="minutes"),
        "flowrl": version("flowrl"),
        "runs": runs,
        "settings": compare_settings(configs),
    }
    text = render_page({"head": head, **parts}, ", ".join(names))
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UserError(f"cannot write {path} ({error.strerror}): set --output to a writable file") from error
    return path


def _output_path(folders: Sequence[Path], output: Path | None) -> Path:
    if output is None:
        return folders[0] / DEFAULT_NAME if len(folders) == 1 else Path(DEFAULT_NAME)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder: name a file in it, such as {output / DEFAULT_NAME}")
    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {output} does not end with .html: choose another name")
    return output


def _collect(folder: Path, name: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the overview of a run, and its larger parts by name. In the overview, `missing` maps the name of each
    missing part to the reason.
    """
    paths = RunFolder(folder)
    records, summary = read_metrics(paths.metrics), read_summary(folder)
    run = run_data(folder, name, config, records, summary)
    parts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if records:
        parts["curves"] = curve_data(records)
    else:
        missing["curves"] = "no step is complete yet" if run["status"] == "running" else "no step was completed"
    timeline = timeline_data(read_trace(paths.trace)) if paths.trace.exists() else None
    if timeline is not None:
        parts["timeline"] = timeline
    else:
        missing["timeline"] = (
            "a run writes trace.json when it ends"
            if run["status"] == "running"
            else "there is no trace.json, or it has no calls of the training loop; a killed run does not write it"
        )
    if any(saved_steps(paths.rollouts, kind) for kind in get_args(Kind)):
        parts["rows"], tokens = completion_data(paths.rollouts)
        if tokens:
            parts["tokens"] = tokens
    else:
        missing["rows"] = _why_no_rows(config)
    if run["system"] is None:
        missing["system"] = "the run was started by a version of flowrl that did not write system.json"
    return run | {"missing": missing}, parts


def _why_no_rows(settings: Mapping[str, Any]) -> str:
    if "rollout" not in settings:
        return "this recipe generates no responses"
    if (settings.get("report") or {}).get("rollouts", {}) is None:
        return "report.rollouts is null, so that no responses are saved"
    return "rollouts/ has no saved rows yet"


SCRIPTS = (
    "data.js",
    "chart.js",
    "curves.js",
    "timeline.js",
    "placement.js",
    "completions.js",
    "overview.js",
    "main.js",
)
"""Scripts of `assets/` in the order of their execution. They share one scope."""


def render_page(parts: Mapping[str, Any], title: str) -> str:
    """Returns the HTML text of a report.

    Each part is JSON, compressed with zlib and encoded in base64, so that browsers never parse generated text as HTML.
    The content security policy allows only the scripts and styles of the report, and no network.
    """
    style = _asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "\n})();"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = "\n".join(
        f'<script type="text/plain" id="data-{name}">{compress(value)}</script>' for name, value in parts.items()
    )
    page = _asset("page.html")
    replacements = {"POLICY": policy, "TITLE": escape(title), "STYLE": style, "DATA": data, "SCRIPT": script}
    pieces = page.split("%%")
    return "".join(replacements[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def compress(value: Any) -> str:  # Any: a value of JSON
    """Returns a value of JSON, compressed with zlib, as base64 text. NaN and infinities become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _asset(name: str) -> str:
    return (files("flowrl.report.page") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
