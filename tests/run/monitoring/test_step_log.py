"""The measurement of the memory of a run, and the order of its log records."""

import time
from collections.abc import Iterator
from typing import Any

from flowrl.data.batch.batch import Batch
from flowrl.run.evaluation import Evaluation, PendingEvaluation
from flowrl.run.monitoring.step_log import PeakMemory, RecordQueue
from flowrl.schedules.rewards import HeldOutResponses


def readings(*values: float) -> Iterator[float]:
    for value in values:
        time.sleep(0.02)
        yield value


def test_memory_is_measured_at_most_one_percent_of_the_time() -> None:
    measured = readings(5.0, 9.0, 7.0, 8.0)
    memory = PeakMemory(measured.__next__)
    assert [memory.measure_mb() for _ in range(10)] == [5.0] * 10
    assert memory.measure_mb(is_required=True) == 9.0
    assert memory.measure_mb(is_required=True) == memory.peak_mb == 9.0
    assert next(measured) == 8.0


def test_a_fast_measurement_is_repeated() -> None:
    values = iter(range(1, 10**6))
    memory = PeakMemory(lambda: float(next(values)))
    first = memory.measure_mb()
    time.sleep(0.05)
    assert memory.measure_mb() > first


def test_the_memory_of_this_process_is_measured() -> None:
    assert 10 < PeakMemory().measure_mb() < 100_000


class LateEvaluation(PendingEvaluation):
    """An evaluation that is done when `finish` is called, or when its values are read."""

    def __init__(self, accuracy: float) -> None:
        calls: Any = None  # the responses wait for no call
        self._own = HeldOutResponses(Batch.from_rows([{"prompt_id": 0}]), 0.0, (), lambda batch: batch, calls)
        super().__init__([self._own], 1, lambda: self._measured(accuracy))

    def _measured(self, accuracy: float) -> Evaluation:
        self.finish()
        return Evaluation({"accuracy": accuracy}, 1, [{"row": 0}])

    def finish(self) -> None:
        self._own.set_responses(Batch.from_rows([{"scores": 1.0}]))


class Written:
    """A queue, and what it has written."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.finished: list[int] = []
        self.queue = RecordQueue(
            lambda step, values: self.records.append({"step": step, **values}),
            lambda step, evaluation: self.finished.append(step),
        )

    @property
    def steps(self) -> list[int]:
        return [int(record["step"]) for record in self.records]


def test_records_wait_for_the_evaluation_of_an_earlier_step() -> None:
    written, evaluation = Written(), LateEvaluation(0.5)
    for step in (1, 2, 3):
        if step == 2:
            written.queue.add_evaluation(step, evaluation)
        written.queue.add_record(step, {"reward": step / 10})
    assert written.steps == [1] and written.queue.pending_evaluations == [(2, 1)]
    evaluation.finish()
    written.queue.add_record(4, {"reward": 0.4})
    assert written.steps == [1, 2, 3, 4] and written.finished == [2] and written.queue.pending_evaluations == []
    assert written.records[1] == {"step": 2, "reward": 0.2, "accuracy": 0.5}
    assert all("accuracy" not in record for record in written.records if record["step"] != 2)


def test_an_evaluation_that_finishes_before_its_record_is_written_with_it() -> None:
    written, evaluation = Written(), LateEvaluation(0.5)
    written.queue.add_evaluation(2, evaluation)
    evaluation.finish()
    written.queue.add_record(1, {})
    written.queue.add_record(2, {"reward": 0.2})
    assert written.records == [{"step": 1}, {"step": 2, "reward": 0.2, "accuracy": 0.5}] and written.finished == [2]


def test_a_flush_waits_for_the_evaluations_up_to_a_step() -> None:
    written = Written()
    for step in (1, 2):
        written.queue.add_evaluation(step, LateEvaluation(step / 10))
        written.queue.add_record(step, {})
    written.queue.flush(1)
    assert written.records == [{"step": 1, "accuracy": 0.1}] and written.queue.pending_evaluations == [(2, 1)]
    written.queue.flush(2)
    assert written.records[1] == {"step": 2, "accuracy": 0.2}


def test_dropped_evaluations_leave_their_records() -> None:
    written = Written()
    written.queue.add_evaluation(1, LateEvaluation(0.1))
    written.queue.add_record(1, {"reward": 0.1})
    written.queue.add_record(2, {})
    written.queue.drop_evaluations()
    assert written.records == [{"step": 1, "reward": 0.1}, {"step": 2}] and written.finished == []


def test_reading_a_pending_evaluation_waits() -> None:
    evaluation = LateEvaluation(0.5)
    assert not evaluation.done() and evaluation.num_rows == 1
    assert dict(evaluation) == {"accuracy": 0.5} and evaluation.done() and evaluation.rows == [{"row": 0}]
