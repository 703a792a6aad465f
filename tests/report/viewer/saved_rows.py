"""Rows of generated text for the tests of the viewer."""

from typing import Any

from flowrl.report.rollout_log import COLUMNS, Row

TOKENS = {
    "text": ["a", "", "é", " b"],
    "ids": [5, 6, 7, 8],
    "mask": [1, 1, 0, 1],
    "logprobs": [-1.0, -0.5, None, -2.0],
    "rollout_logprobs": [-1.5, -0.5, None, -1.0],
    "ratios": [1.6487, 1.0, None, 0.36788],
    "advantages": [0.5, 0.0, None, -2.0],
    "versions": [3, 3, None, 4],
}


def make_row(row: int = 0, **values: Any) -> Row:
    given = {"step": 5, "kind": "training", "row": row, "prompt": f"{row}+1=", "response": "two", "score": 0.5}
    return dict.fromkeys(COLUMNS) | {"other_scores": {}, "prompt_id": row, "response_length": 4} | given | values


def count_characters(response: str) -> float:
    """A reward under which the responses of an untrained model differ."""
    return float(len(response))
