"""The examples of docs/rollout.md, docs/weight_transfer.md and docs/extend_loss.md run as written."""

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowrl import Batch, Cluster, Placement
from flowrl.config import ActorConfig, ModelConfig, OptimizerConfig, ReferenceConfig, RolloutConfig, RunConfig
from flowrl.weight_sync.transfer import WeightSync
from flowrl.workers import LANGUAGE_MODELING, PTX, Actor, Loss, Reference, Rollout


class SplitRun(RunConfig):
    actor: ActorConfig
    rollout: RolloutConfig


def example(page: str, index: int = 0) -> str:
    """Returns a Python block of a page."""
    return re.findall(r"```python\n(.*?)```", Path(f"docs/{page}.md").read_text(), flags=re.DOTALL)[index]


def test_the_rollout_example_runs(model: ModelConfig) -> None:
    placement = Placement(pools={"main": [1]}, roles={"rollout": "main"})
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        config = RolloutConfig(max_response_tokens=16, temperature=0.5)
        names: dict[str, Any] = {"cluster": cluster, "config": config, "model": model}
        exec(example("rollout"), names | {"Batch": Batch, "Rollout": Rollout}, names)
        assert len(names["texts"]) == names["rows"].num_rows == 4


def test_the_weight_transfer_example_runs(model: ModelConfig) -> None:
    placement = Placement(pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    config = SplitRun.model_validate(
        {
            "output": "out",
            "steps": 1,
            "placement": placement,
            "actor": {"model": model, "optimizer": {"lr": 0.01}},
            "rollout": {"max_response_tokens": 4},
        }
    )
    prompts = Batch.from_rows([{"prompt_ids": [2, 3, 12, 4, 14], "prompt_id": i, "sample": 0} for i in range(4)])
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        actor = cluster.group("actor", Actor, config.actor)
        rollout = cluster.group("rollout", Rollout, config.rollout, model, seed=0)
        names: dict[str, Any] = {"actor": actor, "rollout": rollout, "config": config, "cluster": cluster}
        names |= {"prompts": prompts, "batch": rollout.generate(prompts), "WeightSync": WeightSync}
        names["LANGUAGE_MODELING"] = LANGUAGE_MODELING
        exec(example("weight_transfer"), names)
        assert names["responses"].num_rows == 4


def test_the_program_with_a_loss_prints_the_documented_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("extend_loss", 1)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    (expected,) = re.findall(r"print\(.*  # (.*)", program)
    assert capsys.readouterr().out.strip() == expected


def test_the_fragments_with_a_loss_run(model: ModelConfig) -> None:
    placement = Placement(pools={"main": [1]}, roles={"actor": "main", "teacher": "main"})
    tokens = {"input_ids": [2, 3, 12, 4], "response_mask": [False, False, True, True]}
    batch = Batch.from_columns(
        tokens=tokens | {name: [-1.0] * 4 for name in ("old_logprobs", "advantages")}, lengths=[4]
    )
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        config = ActorConfig(model=model, optimizer=OptimizerConfig(lr=0.01))
        names: dict[str, Any] = {"Tensor": Tensor, "Loss": Loss, "batch": batch, "replace": replace}
        names |= {"actor": cluster.group("actor", Actor, config), "minibatch": batch, "text": batch}
        names |= {"teacher": cluster.group("teacher", Reference, ReferenceConfig(model=model)), "logged": []}
        names |= {"PTX": PTX, "my_loss": lambda logprobs, *, beta: -beta * logprobs}
        exec(example("extend_loss", 0).replace("run.log(", "logged.append("), names)
        exec(example("extend_loss", 2), names)
        assert names["logged"][0].get()["actor/skipped_update"].result() == 0
        assert "teacher_topk_logprobs" in names["batch"]
