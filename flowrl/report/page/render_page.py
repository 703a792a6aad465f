"""Renders the document of a report as one HTML file: data, styles and scripts are inline."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from flowrl.data.metric import finite

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
    replacements = {"POLICY": policy, "TITLE": _escape(title), "STYLE": style, "DATA": data, "SCRIPT": script}
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


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
