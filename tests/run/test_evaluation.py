"""A run keeps its first and its last evaluation."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from flowrl.report.progress import EvaluationResult
from flowrl.run.evaluation import Evaluations


@dataclass
class Rising:
    """An evaluation whose accuracy rises with the step."""

    unit: ClassVar[str] = "prompts"
    num_rows: int = 4

    def measure(self, step: int) -> EvaluationResult:
        return EvaluationResult(step, step / 10, 1.0, self.num_rows)


def test_the_first_and_the_last_result_are_kept_and_restored() -> None:
    evaluations = Evaluations()
    evaluations.evaluation = Rising()
    for step in range(6):
        evaluations.measure(step)
        assert evaluations.has_result_of(step)
    assert [result.step for result in evaluations.results] == [0, 5]
    restored = Evaluations()
    restored.evaluation = Rising()
    restored.restore(evaluations.state())
    assert restored.results == evaluations.results
    assert restored.summary(5) == {"accuracy_before": 0.0, "accuracy_after": 0.5, "evaluation_rows": 4}
    restored.measure(6)
    assert [result.step for result in restored.results] == [0, 6]


def test_checkpoints_of_earlier_versions_have_all_results_with_responses() -> None:
    results = [EvaluationResult(step, step / 10, 3.0, 8) for step in range(3)]
    restored = Evaluations()
    restored.restore([asdict(result) | {"samples": [{"prompt": "1+1="}]} for result in results])
    assert restored.results == [results[0], results[2]]
