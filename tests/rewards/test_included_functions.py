"""The included reward functions in the processes of a pool."""

import json

import pytest

from flowrl.config import DataFile
from flowrl.data.reading.generated_rows import generate_lines
from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.rewards.reward_function import FunctionSpec

FUNCTIONS = {
    "math": ("math:score", {}),
    "gsm8k": ("gsm8k:score", {"flexible": True}),
    "code": ("code:score", {"timeout_s": 10}),
    "tasks": ("reasoning_gym:score", {"only_tagged": True}),
    "tags": ("text:has_tags", {"tags": ["answer"]}),
    "length": ("text:length", {"maximum": 3}),
}


@pytest.mark.slow
def test_the_functions_score_rows_in_a_pool() -> None:
    (line,) = generate_lines(DataFile.model_validate({"reasoning_gym": {"leg_counting": 1}, "rows": 1}))
    task = json.loads(line)
    code = "```python\ndef add(a, b):\n    return a + b\n```"
    rows = [
        ("math", {"response": r"\boxed{\frac12}", "answer": "0.5"}, 1.0),
        ("math", {"response": r"\boxed{9^{9^{9^{9}}}}", "answer": "0.5"}, 0.0),
        ("gsm8k", {"response": "It is 3.", "answer": "#### 3"}, 1.0),
        ("code", {"response": code, "tests": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, 0.5),
        ("code", {"response": "```python\nwhile True: pass\n```", "tests": [{"input": "", "output": ""}]}, 0.0),
        ("tasks", task | {"response": f"<answer>{task['answer']}</answer>"}, 1.0),
        ("tasks", task | {"response": task["answer"]}, 0.0),
        ("tags", {"response": "<answer>3</answer>"}, 1.0),
        ("length", {"response": "four"}, 0.0),
    ]
    specs = [
        FunctionSpec(name, f"flowrl.rewards.{function}", options) for name, (function, options) in FUNCTIONS.items()
    ]
    with ScoringPool(specs, PoolLimits(workers=2, timeout_s=120)) as pool:
        outcomes = [pool.submit(name, {"prompt": "", **row}).result(180) for name, row, _ in rows]
    assert [(outcome.score, outcome.message) for outcome in outcomes] == [(expected, "") for *_, expected in rows]
