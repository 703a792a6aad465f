"""A recipe whose files exist."""

from pathlib import Path

import pytest

from tests.small_task import prepare_small

RECIPE = """
recipe: recipes.grpo.config:GRPOConfig
output: {folder}/run
placement: {{device: cpu, pools: {{main: [2]}}, roles: {{actor: main, rollout: main, reference: main, reward: main}}}}
steps: 100
threads: 1
evaluate_every: 10
batch_size: 64
minibatch_size: 16
samples_per_prompt: 4
actor:
  model: {{path: {folder}/data/model}}
  optimizer: {{lr: 0.001}}
  engine: {{strategy: fsdp}}
reference:
  model: {{path: {folder}/data/model}}
reward:
  function: recipes.quickstart.task:score
  evaluation: recipes.quickstart.task:exact
rollout:
  max_response_tokens: 5
algorithm:
  estimator: grpo
data:
  train: {folder}/data/train.jsonl
  test: {folder}/data/test.jsonl
  max_prompt_tokens: 6
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    prepare_small(folder / "data")
    for name in ("train", "test"):
        path = folder / f"data/{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path
