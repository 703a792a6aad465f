import io
from pathlib import Path

import pytest
from rich.console import Console

from flowrl.checkpoints.listing import age, show_checkpoints, size
from flowrl.data.checksums import CheckpointError
from tests.checkpoints.test_checkpoints import accuracy, save


def shown(run: Path) -> list[list[str]]:
    """Returns the cells of every row."""
    console = Console(file=io.StringIO(), width=120)
    show_checkpoints(run, console)
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_checkpoint_is_a_row(tmp_path: Path) -> None:
    save(tmp_path, 20, accuracy(0.25))
    save(tmp_path, 40)
    (tmp_path / "checkpoints/step-000040/actor/a").unlink()
    first, second = shown(tmp_path)
    assert first[:4] == ["20", "accuracy", "0.2500", "18 B"] and first[-1] == "complete"
    assert second[:4] == ["40", "", "", "18 B"]
    assert second[-1].startswith("corrupt: actor/a ")


def test_a_corrupt_manifest_is_listed_as_a_row(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    assert shown(tmp_path)[0][-1].startswith("corrupt: manifest.json")


def test_a_run_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        show_checkpoints(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"checkpoint\.every=N"):
        show_checkpoints(tmp_path)


def test_figures_have_units() -> None:
    assert [size(n) for n in (0, 999, 1500, 8_050_000, 2.5e9, 3e13)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "8.05 MB",
        "2.5 GB",
        "30 TB",
    ]
    assert [age(s) for s in (0.2, 59, 90, 7200, 100_000)] == ["0 s", "59 s", "2 min", "2 h", "1 d"]
