"""Results of evaluations in checkpoints."""

from flowrl.report.progress import EvaluationResult, LossResult
from flowrl.run.evaluation import Evaluations


def test_results_are_restored_from_their_state() -> None:
    results = [EvaluationResult(0, 0.25, 3.0, 8), LossResult(4, 1.5, 8)]
    evaluations, restored = Evaluations(), Evaluations()
    evaluations.results = [*results]
    restored.restore(evaluations.state())
    assert restored.results == results


def test_responses_in_checkpoints_of_earlier_versions_are_ignored() -> None:
    evaluations, restored = Evaluations(), Evaluations()
    evaluations.results = [EvaluationResult(0, 0.25, 3.0, 8)]
    restored.restore([state | {"samples": [{"prompt": "1+1="}]} for state in evaluations.state()])
    assert restored.results == evaluations.results
