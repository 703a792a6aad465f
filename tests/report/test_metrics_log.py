import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.report.metrics_log import MetricsLog


def test_every_step_is_one_line_with_null_for_nan(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"accuracy": 0.25})
        log.write(1, {"reward": 0.5, "kl": float("nan")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "accuracy": 0.25},
        {"step": 1, "reward": 0.5, "kl": None},
    ]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"reward": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'
    log.close()
    log.close()


def test_tensorboard_reads_the_same_values(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"actor/loss": 0.5})
        log.write(2, {"actor/loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("actor/loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.25)]


def test_the_history_has_every_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward": 0.5})
        log.write(2, {"reward": 0.75})
    assert log.history == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}]


def test_a_step_is_written_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward": 0.5})
        with pytest.raises(AssertionError):
            log.write(1, {"reward": 0.5})


def test_a_resumed_log_keeps_the_lines_up_to_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (0, 1, 2, 3):
            log.write(step, {"reward": step / 4, "kl": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    with MetricsLog(tmp_path, last_step=2) as log:
        assert [row["step"] for row in log.history] == [0, 1, 2]
        log.write(3, {"reward": 9.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 9.0)]
    assert lines[1]["kl"] is None


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward": 0.5})
    with MetricsLog(tmp_path, last_step=1) as log:
        log.write(2, {"reward": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.75)]


def test_tensorboard_is_optional(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, has_tensorboard=False) as log:
        log.write(1, {"reward": 0.5})
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_matplotlib_and_tensorboard_are_loaded_only_when_used() -> None:
    code = "import sys, flowrl.run.loop; print({'matplotlib', 'tensorboard'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
