"""The table of docs/failures.md, generated from the results."""

import json
from collections import defaultdict
from statistics import median
from typing import Any

from tests.chaos.program import ROOT

RESULTS = ROOT / "tests/chaos/results.jsonl"
PAGE = ROOT / "docs/failures.md"
BEGIN, END = "<!-- begin: faults -->", "<!-- end: faults -->"

Row = dict[str, Any]  # Any: the values of a JSON object


def read_results() -> list[Row]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def render_table(rows: list[Row]) -> str:
    """Returns one line per fault, role and schedule: counts, medians and commits."""
    groups: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        schedule, engine, target, fault, _ = row["case"].split("-")
        groups[fault, target, schedule if engine == "hf" else f"{schedule}, {engine}"].append(row)
    lines = [
        "| fault | target | schedule | faults | continued | numbers | cause | clean | correct | report (s) "
        "| progress (s) | commits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(key)} | {len(group)} | {' | '.join(_cells(group))} |" for key, group in sorted(groups.items())
    ]
    return "\n".join([*lines, f"| all | | | {len(rows)} | {' | '.join(_cells(rows))} |"]) if rows else ""


def _cells(rows: list[Row]) -> list[str]:
    continued = [row for row in rows if row["outcome"] != "stuck" and not row["outcome"].startswith("unexpected")]
    counts = (
        len(continued),
        sum(row["numbers"] is True for row in rows),
        sum(not row["missing"] for row in rows),
        f"{sum(row['leftovers'] == [] for row in rows)} of {sum(row['leftovers'] is not None for row in rows)}",
        sum(row["correct"] for row in rows),
    )
    times = (_times([row[name] for row in rows if row[name] is not None]) for name in ("report_s", "progress_s"))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return [*map(str, counts), *times, commits]


def _times(values: list[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else ""


def append_rows(lines: str) -> None:
    """Adds JSON lines to the results, and replaces the table in the page."""
    with RESULTS.open("a") as file:
        file.write(lines)
    write_table()


def write_table() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render_table(read_results())}\n\n{END}{after}")
