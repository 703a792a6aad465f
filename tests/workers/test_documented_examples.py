"""The examples of docs/rollout.md and docs/weight_transfer.md run as written."""

import re
from pathlib import Path
from typing import Any

import pytest

from flowrl import Batch, Cluster, Placement
from flowrl.config import ActorConfig, ModelConfig, RolloutConfig, RunConfig
from flowrl.weight_sync.transfer import WeightSync
from flowrl.workers import Actor, Rollout
from recipes.quickstart.prepare import prepare


class SplitRun(RunConfig):
    roles = ("actor", "rollout")

    actor: ActorConfig
    rollout: RolloutConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("documented") / "data"
    prepare(folder, seed=0)
    return ModelConfig(path=folder / "model")


def example(page: str) -> str:
    """Returns the first Python block of a page."""
    block = re.search(r"```python\n(.*?)```", Path(f"docs/{page}.md").read_text(), flags=re.DOTALL)
    assert block is not None
    return block[1]


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
        exec(example("weight_transfer"), names)
        assert names["responses"].num_rows == 4
