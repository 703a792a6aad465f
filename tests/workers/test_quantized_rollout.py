"""int8 rollouts, colocated with the actor and separate: they use the quantization of the last version."""

from typing import Any

import pytest
import torch

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, LoraConfig, ModelConfig, OptimizerConfig, RolloutConfig
from flowrl.controller.errors import WorkerError
from flowrl.engines.models.int8 import int8_layers, quantized_copy
from flowrl.engines.models.weights import full_weights, write_weights
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.workers import LANGUAGE_MODELING, Actor, Rollout

CONFIG = RolloutConfig(max_response_tokens=6, temperature=0.5, quantization="int8")
PROMPTS = [{"prompt_ids": [2, 3, 12, 4, 14], "prompt_id": i, "sample": 0} for i in range(16)]
LORA = LoraConfig(rank=4, alpha=8.0)
TOGETHER = {"actor": "main", "rollout": "main"}


def groups(cluster: Cluster, model: ModelConfig, **settings: Any) -> tuple[WorkerGroup, WorkerGroup]:
    own = {"model": model, "optimizer": OptimizerConfig(lr=0.01), "temperature": 0.5}
    config = ActorConfig.model_validate(own | settings)
    actor = cluster.group("actor", Actor, config)
    return actor, cluster.group("rollout", Rollout, CONFIG, model, seed=0)


def trained(actor: WorkerGroup) -> None:
    ids = [2, 3, 12, 4, 14, 5, 6, 1]
    tokens = {"input_ids": ids * 2, "response_mask": ([False] * 5 + [True] * 3) * 2}
    actor.update(Batch.from_columns(tokens=tokens, lengths=[8, 8]), LANGUAGE_MODELING).get()


def generate_columns(rollout: WorkerGroup) -> list[list[float]]:
    """Returns tokens, log-probabilities and versions."""
    responses = rollout.generate(Batch.from_rows(PROMPTS))
    mask = responses.get("response_mask")
    return [responses.get(name)[mask].tolist() for name in ("input_ids", "rollout_logprobs", "weight_version")]


def is_quantized_from_actor(rollout: Rollout) -> bool:
    """Returns whether the weights are bitwise the quantization of the actor's current weights."""
    actor = rollout.peer("actor")
    assert isinstance(actor, Actor)
    assert isinstance(rollout.engine, HfRollout)
    model = rollout.engine.model
    expected = quantized_copy(model, torch.device("cpu"))
    write_weights(expected, full_weights(actor.language_model))
    same = [torch.equal(weight, expected.state_dict()[name]) for name, weight in model.state_dict().items()]
    return bool(int8_layers(model)) and all(same)


def test_colocated_and_separate_rollouts_are_identical(model: ModelConfig) -> None:
    split = Placement(pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    responses = []
    for placement in (Placement(pools={"main": [1]}, roles=TOGETHER), split):
        with Cluster(placement, backend="inline", num_threads=1) as cluster:
            actor, rollout = groups(cluster, model)
            generated = [generate_columns(rollout)]
            for version in (1, 2):
                trained(actor)
                # Weights that were not synced are not used, wherever the actor is.
                assert generate_columns(rollout) == generated[-1]
                if placement is split:
                    rollout.load_weights(actor.weights(), version)
                else:
                    rollout.set_version(version)
                generated.append(generate_columns(rollout))
            responses.append(generated)
    assert responses[0] == responses[1]
    assert len({str(tokens) for tokens, _, _ in responses[0]}) == 3 and set(responses[0][2][2]) == {2}


def check_updates(cluster: Cluster, model: ModelConfig, ranks: int, **settings: Any) -> None:
    actor, rollout = groups(cluster, model, **settings)
    assert rollout.run(is_quantized_from_actor) == [True] * ranks
    for version in (1, 2):
        trained(actor)
        assert rollout.run(is_quantized_from_actor) == [False] * ranks
        rollout.set_version(version)
        assert rollout.run(is_quantized_from_actor) == [True] * ranks
        generate_columns(rollout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_set_version_quantizes_the_actors_weights_again(
    lora: LoraConfig | None, dtype: Any, model: ModelConfig
) -> None:
    placement = Placement(pools={"main": [1]}, roles=TOGETHER)
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        check_updates(cluster, ModelConfig(path=model.path, dtype=dtype), 1, lora=lora)


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.slow)])
def test_a_sharded_actor_is_quantized(lora: LoraConfig | None, model: ModelConfig, ray_session: None) -> None:
    placement = Placement(device="cpu", pools={"main": [2]}, roles=TOGETHER)
    with Cluster(placement, num_threads=1) as cluster:
        check_updates(cluster, model, 2, engine={"strategy": "fsdp"}, lora=lora)


def test_an_update_without_a_quantized_weight_is_rejected(model: ModelConfig) -> None:
    placement = Placement(pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        actor, rollout = groups(cluster, model)
        weights = actor.weights().get()
        del weights["model.layers.0.self_attn.q_proj.weight"]
        with pytest.raises(WorkerError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
            rollout.load_weights(weights, 1).get()
