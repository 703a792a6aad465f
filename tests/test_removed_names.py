"""Identifiers that were renamed to standard terms (docs/glossary.md) do not return."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("flowrl", "recipes", "tests", "docs", "placement")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml", ".sh") and path != Path(__file__)
)

REMOVED = (
    "Attempts",
    "Attendants",
    "Carried",
    "FileSum",
    "Handover",
    "Makers",
    "Pace",
    "Pulse",
    "Revival",
    "Revivals",
    "StepState",
    "SummedFile",
    "Turns",
    "WholeBatches",
    "_Lane",
    "_LinkedWay",
    "_SharedWay",
    "_Way",
    "goes_on",
    "hand_over",
    "input_sums",
    "is_too_slow",
    "is_whole",
    "kept_rows",
    "max_row_tokens",
    "minibatch_rows",
    "or_broken",
    "rows_per_step",
    "start_again",
    "take_back",
    "take_whole",
    "went_well",
)
"""Names of classes, functions and settings."""

EXCEPTIONS = {
    f"flowrl/config/load.py:{name}": "the table that maps removed settings to new ones"
    for name in ("max_row_tokens", "minibatch_rows", "rows_per_step")
}
"""path:name -> reason."""

_REMOVED_NAME = re.compile(rf"\b({'|'.join(REMOVED)})\b")


@pytest.mark.parametrize("folder", ["flowrl", "recipes", "tests", "docs", "placement"])
def test_removed_names_are_not_used(folder: str) -> None:
    uses = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for name in _REMOVED_NAME.findall(path.read_text())
    }
    assert sorted(uses - EXCEPTIONS.keys()) == []
