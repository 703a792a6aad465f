"""The result of a model on a task, from an evaluation that may be pending."""

import torch

from flowrl.config import EvaluationConfig
from flowrl.inference.evaluation.model_scores import _collect
from flowrl.run.evaluation import Evaluation, PendingEvaluation, PromptScores


def test_a_pending_evaluation_has_its_scores_and_rows() -> None:
    scores: dict[str, PromptScores] = {}

    def measure() -> Evaluation:
        scores[""] = PromptScores(torch.tensor([[1.0, 0.0]]), [7], [None])
        return Evaluation({"accuracy": 0.5}, 1, [{"prompt": "p", "sample": sample} for sample in range(2)])

    pending = PendingEvaluation([], 1, measure)
    pending.scores = scores
    result = _collect("hard", pending, EvaluationConfig(samples=2, temperature=1.0, pass_score=0.5))
    assert result.metrics == {"accuracy": 0.5} and result.scores is scores[""] and result.pass_score == 0.5
    assert result.prompts == ["p"] and [row["set"] for row in result.rows] == ["hard"] * 2
