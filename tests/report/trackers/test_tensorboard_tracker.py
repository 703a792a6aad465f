from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.report.trackers.tensorboard_tracker import EventFile
from tests.full_disk import file_size_limit


def test_events_are_in_the_file_as_soon_as_they_are_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tensorboard")
    file.write_scalars(1, {"loss": 0.5, "reward": 1.0})
    file.write_text("rollouts", 1, "**prompt**")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for name in ("loss", "reward") for event in events.Scalars(name)] == [
        (1, 0.5),
        (1, 1.0),
    ]
    (text,) = events.Tensors("rollouts/text_summary")
    assert text.step == 1 and list(text.tensor_proto.string_val) == [b"**prompt**"]
    file.close()
    file.close()


def test_a_new_file_hides_the_later_steps_of_an_older_file(tmp_path: Path) -> None:
    for attempt in range(12):  # within a second
        file = EventFile(tmp_path, purge_step=2)
        for step in (1, 2, 3)[attempt > 0 :]:
            file.write_scalars(step, {"reward": float(attempt)})
        file.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.0), (2, 11.0), (3, 11.0)]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    with pytest.raises(OSError) as caught, file_size_limit(50_000):
        for step in range(1000):
            file.write_text("rollouts", step, "x" * 100)
    assert [caught.value.filename] == list(map(str, tmp_path.iterdir()))
    file.close()
