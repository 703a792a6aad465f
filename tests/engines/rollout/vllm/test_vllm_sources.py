"""Weights of sharded actors and of actors with an adapter arrive in real vLLM."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, ModelConfig, RolloutConfig
from flowrl.workers import LANGUAGE_MODELING, Actor, Rollout
from tests.engines import tiny
from tests.engines.closeness import FLOAT32_RTOL, relative_error
from tests.engines.rollout.vllm.test_engine import PROMPTS, SIZES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

SOURCES: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": {"strategy": "fsdp"}},
    "tp": {},
    "fsdp_lora": {"engine": {"strategy": "fsdp"}, "lora": {"rank": 4, "alpha": 64}},
}
"""Role -> settings of its actor on two ranks."""


@pytest.fixture(scope="module")
def groups(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerGroup]]:
    """The actors and one rollout that receives the weights of each."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny.save(Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    roles: dict[str, Any] = dict.fromkeys(SOURCES, "trainers") | {"tp": {"pool": "trainers", "tp": 2}}
    placement = Placement.model_validate(
        {"device": "cpu", "pools": {"trainers": [2], "rollouts": [1]}, "roles": roles | {"rollout": "rollouts"}}
    )
    model, config = ModelConfig(path=folder), RolloutConfig(engine="vllm", max_response_tokens=12)
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        groups: dict[str, WorkerGroup] = {"rollout": cluster.group("rollout", Rollout, config, model, seed=0)}
        for role, settings in SOURCES.items():
            actor = ActorConfig.model_validate({"model": model, "optimizer": {"lr": 0.02}, **settings})
            groups[role] = cluster.group(role, Actor, actor)
        yield groups


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_weights_of_a_sharded_actor_arrive(source: str, groups: dict[str, WorkerGroup]) -> None:
    actor, rollout = groups[source], groups["rollout"]
    version = 1 + list(SOURCES).index(source)
    prompts = Batch.from_rows([{"prompt_ids": ids, "prompt_id": i, "sample": 0} for i, ids in enumerate(PROMPTS)])
    previous = rollout.generate(prompts)
    actor.update(previous, LANGUAGE_MODELING).get()
    count = actor.num_buckets(0.05).get()
    assert count > 3
    for bucket in range(count):
        rollout.load_weights(actor.weights(bucket, 0.05), version, bucket, count)
    (compared,) = rollout.check_weights(actor.weight_samples(version, subset=0, num_subsets=1)).get()
    assert compared.count > 20 and not compared.unreached
    responses = rollout.generate(prompts)
    mask = responses.get("response_mask")
    assert (
        relative_error(responses.get("rollout_logprobs")[mask], actor.logprobs(responses).get("logprobs")[mask])
        < FLOAT32_RTOL
    )
    assert set(responses.get("weight_version").tolist()) == {-1, version}
    moved = actor.logprobs(previous).get("logprobs") - previous.get("rollout_logprobs")
    assert moved[previous.get("response_mask")].abs().max() > 0.01, "the step changed nothing that would show"
