from pathlib import Path

import pytest
from matplotlib.image import imread

from flowrl.data.events import CallEvent
from flowrl.report.timeline import draw_timeline
from tests.report.call_events import STEP, call

EVENTS = [
    call("actor", 10_000, 60_000),
    call("critic", 20_000, 80_000, device="cpu:1", pool="second"),
    call("actor", 70_000, 90_000),
    call("reward", 30_000, 40_000, rank=1, device="cpu:1", pool="second"),
]


@pytest.mark.parametrize("events", [EVENTS, STEP, []])
@pytest.mark.parametrize("window_s", [None, 1e-5])
@pytest.mark.parametrize("until_ns", [None, 50_000])
def test_a_timeline_is_a_png(
    tmp_path: Path, events: list[CallEvent], window_s: float | None, until_ns: int | None
) -> None:
    draw_timeline(events, tmp_path / "timeline.png", window_s=window_s, until_ns=until_ns)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_comes_after_the_end_of_the_picture_is_not_drawn(tmp_path: Path) -> None:
    # A later call on a row that is there anyway, of the same kind: without it the picture is the same.
    later = call("actor", 95_000, 99_000)
    draw_timeline([*EVENTS, later], tmp_path / "with.png", until_ns=90_000)
    draw_timeline(EVENTS, tmp_path / "without.png", until_ns=90_000)
    assert (imread(tmp_path / "with.png") == imread(tmp_path / "without.png")).all()
