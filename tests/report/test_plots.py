"""The picture of a model card."""

from pathlib import Path

import pytest

from flowrl.report.plots import PANELS, draw_curves, select_lines, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def test_curves_of_a_run_are_a_png(tmp_path: Path) -> None:
    history = [{"step": step, "reward": step / 50, "kl": float("nan") if step % 2 else 0.1} for step in range(50)]
    draw_curves([*history, {"step": 50, "accuracy": 0.5}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_a_run_without_metrics_has_a_plot(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


IDLE = {"idle_rollout": 0.2, "idle_actor": 0.4}


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        (IDLE, {}),
        (
            IDLE | {"staleness": 0.9, "staleness_max": 1.0},
            {"Staleness (versions)": ["mean", "max"], "Idle fraction of the step": ["rollout", "actor"]},
        ),
        (
            IDLE | {"staleness": 0.9, "staleness_max": 1.0, "buffer_depth": 3.0},
            {
                "Staleness (versions)": ["mean", "max"],
                "Buffer depth (prompts)": [""],
                "Idle fraction of the step": ["rollout", "actor"],
            },
        ),
    ],
)
def test_schedule_panels_are_drawn_if_the_run_has_staleness(
    tmp_path: Path, values: dict[str, float], schedule: dict[str, list[str]]
) -> None:
    history = [{"step": step, "reward": 0.5} | values for step in range(3)]
    shown = {panel.title: [line.label for line, _ in select_lines(history, panel)] for panel in PANELS}
    assert {title: labels for title, labels in shown.items() if labels} == {"Mean reward": [""]} | schedule
    draw_curves(history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])


def test_smoothing_is_an_exponential_moving_average() -> None:
    assert smooth([0.0, 3.0], weight=0.5) == pytest.approx([0.0, 2.0])
