"""The table of docs/failures.md with one row per kind of misbehavior, generated from the results."""

import json
from statistics import median
from typing import Any

from tests.chaos.program import ROOT
from tests.chaos.user_code.misbehavior_kinds import KINDS, STEPS, Kind

RESULTS = ROOT / "tests/chaos/user_code/results.jsonl"
PAGE = ROOT / "docs/failures.md"
BEGIN, END = "<!-- begin: user code -->", "<!-- end: user code -->"

Row = dict[str, Any]  # Any: the values of a JSON object


def read_results() -> list[Row]:
    """Returns the newest result of each kind, in the order of the kinds."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    by_kind = {row["kind"]: row for row in rows}
    return [by_kind[kind] for kind in KINDS if kind in by_kind]


def render_table(rows: list[Row]) -> str:
    lines = [
        "| code | it | `on_failure` | calls | steps of the run | rows lost | other rows | exit code | seconds lost "
        "| left behind | load | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(KINDS[row['kind']], row))} |" for row in rows]
    correct = sum(not row["problems"] for row in rows)
    lost = [row["seconds_lost"] for row in rows if row["seconds_lost"] is not None]
    if lost:
        lines.append(
            f"| all | {len(rows)} kinds, {correct} as expected | | {sum(row['calls'] for row in rows)} | | "
            f"{sum(row['lost'] for row in rows)} | | | median {median(lost):.1f}, maximum {max(lost):.1f} | | | |"
        )
    return "\n".join(lines)


def _cells(kind: Kind, row: Row) -> list[str]:
    text = kind.text + (f" ({kind.form})" if kind.form != "sync" else "")
    is_compared = kind.has_same_numbers and row["steps"]
    numbers = "" if not is_compared else "identical" if row["has_same_numbers"] else "different"
    return [
        kind.source,
        text,
        f"`{kind.on_failure}`",
        str(row["calls"]) if kind.on_failure == "zero" else "",  # other rows of failed calls are not saved
        describe_run(kind, row),
        str(row["lost"]),
        numbers,
        str(row["exit_code"]),
        "" if row["seconds_lost"] is None else f"{row['seconds_lost']:.1f}",
        ", ".join(row["leftovers"]) or "nothing",
        str(row["load"]),
        row["commit"],
    ]


def describe_run(kind: Kind, row: Row) -> str:
    """Returns the number of complete steps, and the events that the run has counted."""
    steps = f"{row['steps']} of {STEPS}"
    if row["exit_code"]:
        return f"{steps}; ends with an error that names the cause"
    if kind.counted is not None:
        return f"{steps}; `{kind.counted}`: {row['counted'].get(kind.counted, 0)}"
    restarts = row["counted"].get("environment/restarts", 0)
    return steps + (f"; episodes started again: {restarts}" if restarts else "")


def replace_row(row: Row) -> None:
    """Replaces the result of a kind in the results, and the table in the page."""
    rows = [own for own in read_results() if own["kind"] != row["kind"]] + [row]
    rows.sort(key=lambda own: list(KINDS).index(own["kind"]))
    RESULTS.write_text("".join(json.dumps(own) + "\n" for own in rows))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render_table(read_results())}\n\n{END}{after}")
