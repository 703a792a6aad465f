"""Named evaluation sets in a run: the steps in which each set is evaluated, its metrics, and a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.data.batch.batch import Batch
from flowrl.run.evaluation import Evaluation
from flowrl.run.loop import Run
from tests.run.echo_run import QUIET, Counting, EchoConfig, lines

SETS = {"own": {"every": 2}, "rare": {"every": 100}, "never": {"every": 0}, "default": {}}
DUE = {"": [0, 3, 6, 7], "own": [0, 2, 4, 6, 7], "rare": [0, 7], "never": [], "default": [0, 3, 6, 7]}
"""Set -> steps in which it is evaluated, in a run of 7 steps with `evaluate_every: 3`."""


def with_sets(config: Callable[..., EchoConfig], **changes: Any) -> EchoConfig:
    data = config().data.model_dump()
    tests = {name: own | {"files": data["test"]} for name, own in SETS.items()}
    return config(evaluate_every=3, report=QUIET, data=data | {"tests": tests}, **changes)


def evaluated(config: EchoConfig) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Runs a loop whose evaluations count their step. Returns the steps of each set, and the summary."""
    steps: dict[str, list[int]] = {name: [] for name in config.data.evaluation_sets}
    held_out = {name: Batch.from_rows([{"prompt_id": 0}]) for name in steps}
    with Run(config) as run:
        actor: Any = run.group("actor", Counting)
        run.add_checkpointable(actor)

        def evaluate(sets: dict[str, Batch]) -> Evaluation:
            for name in sets:
                steps[name].append(run.step)
            names = {f"accuracy/{name}" if name else "accuracy" for name in sets}
            return Evaluation(dict.fromkeys(sorted(names), run.step / 10), len(sets))

        run.add_evaluation(held_out, evaluate)
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(20)])
        for _ in run.batches(rows.minibatches(2), policy=actor):
            run.log({"loss": 1.0})
        return steps, run.finish()


def test_each_set_is_evaluated_at_its_own_interval(config: Callable[..., EchoConfig]) -> None:
    settings = with_sets(config, steps=7)
    steps, summary = evaluated(settings)
    assert steps == DUE
    names = {name: f"accuracy/{name}" if name else "accuracy" for name in DUE}
    records = lines(settings)
    for name, key in names.items():
        assert [record["step"] for record in records if key in record] == DUE[name]
    assert summary["accuracy/rare_before"] == summary["accuracy_before"] == 0.0
    assert summary["accuracy/rare_after"] == summary["accuracy/own_after"] == summary["accuracy_after"] == 0.7
    assert summary["evaluation_rows"] == 4 and "accuracy/never_before" not in summary


def test_a_resumed_run_continues_the_schedule_of_each_set(config: Callable[..., EchoConfig]) -> None:
    """The last step of the first run evaluates all sets. The resumed run changes no other step."""
    first, _ = evaluated(with_sets(config, steps=5, checkpoint={"every": 4}))
    assert first == {name: [step for step in steps if step < 5] + [5] * bool(steps) for name, steps in DUE.items()}
    again, summary = evaluated(with_sets(config, steps=7, checkpoint={"every": 4}, resume="auto"))
    assert again == {name: [step for step in steps if step > 5] for name, steps in DUE.items()}
    assert (summary["accuracy/own_before"], summary["accuracy/own_after"]) == (0.0, 0.7)


def test_the_interval_of_a_set_may_change_on_resume(config: Callable[..., EchoConfig]) -> None:
    evaluated(with_sets(config, steps=5, checkpoint={"every": 4}))
    settings = with_sets(config, steps=7, checkpoint={"every": 4}, resume="auto")
    saved = json.loads(settings.model_dump_json())
    saved["data"]["tests"]["own"]["every"] = 6
    assert evaluated(EchoConfig.model_validate(saved))[0]["own"] == [6, 7]


def test_a_set_that_the_last_step_does_not_evaluate_has_no_value_after_training(
    config: Callable[..., EchoConfig], tmp_path: Path
) -> None:
    with Run(with_sets(config, steps=2)) as run:
        actor: Any = run.group("actor", Counting)
        run.log(Evaluation({"accuracy": 0.1, "accuracy/rare": 0.2}, 2))
        rows = Batch.from_rows([{"version": i, "sample": 0} for i in range(4)])
        for _ in run.batches(rows.minibatches(2), policy=actor):
            run.log(Evaluation({"accuracy": 0.3}, 1))
        summary = run.finish()
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.1, 0.3)
    assert (summary["accuracy/rare_before"], summary["accuracy/rare_after"]) == (0.2, None)
