"""Writes models into a folder that has the layout of the cache of the Hugging Face Hub."""

from pathlib import Path

REVISION = "abc"


def make_snapshot(cache: Path, model: str) -> Path:
    """Adds a Hub model to a cache, as its newest revision. Returns the new, empty folder for the files of the model."""
    folder = cache / "--".join(["models", *model.split("/")])
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    return snapshot
