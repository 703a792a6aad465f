"""Weights that a rollout merges from the files of a base model and an adapter."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config import LoraConfig, ModelConfig, RolloutConfig
from flowrl.engines.models.adapters.lora import save_adapter
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.weight_samples import weight_samples
from flowrl.engines.models.weights import export_weights, to_arrays
from flowrl.engines.rollout.adapted_weights import AdaptedWeights, start_engine
from flowrl.engines.rollout.base import EngineContext
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.train.fsdp.engine import FsdpEngine
from tests.engines.models.adapters.test_lora import LORA, MODELS, trained
from tests.engines.rollout.scripted_engine import ScriptedEngine
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import save, tokenizer

CPU = torch.device("cpu")
COMPLETE = LoraConfig(rank=4, alpha=8.0, rslora=True, modules_to_save=("lm_head",))


def policy(tmp_path: Path, name: str, lora: LoraConfig) -> tuple[ModelConfig, FsdpEngine]:
    """Returns the base model in files, and an engine that has trained an adapter on it."""
    config = ModelConfig(path=save(MODELS[name](), tmp_path / "start"))
    return config, trained(load_policy(config), lora)


def hf_rollout(config: ModelConfig) -> HfRollout:
    settings = RolloutConfig(engine="hf", max_response_tokens=4)
    engine = start_engine(EngineContext(settings, config, tokenizer(), "cpu"))
    assert isinstance(engine, HfRollout)
    return engine


@pytest.mark.parametrize("lora", [LORA, COMPLETE], ids=["matrices", "rslora and a complete head"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rollout_gets_bitwise_the_merged_weights_of_the_actor(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    config, actor = policy(tmp_path, name, lora)
    rollout = hf_rollout(config)
    adapted = AdaptedWeights(config, lora, CPU)
    for version in (1, 2):
        adapter = to_arrays(actor.export_adapter())
        if lora is LORA:  # the size of an adapter does not depend on that of the model
            sizes = sum(array.size for array in adapter.values())
            assert sizes == sum(p.numel() for p in actor.model.parameters() if p.requires_grad)
        adapted.set(adapter)
        adapted.load_into(rollout, version, 0.01, None)
        expected, actual = export_weights(actor.language_model), export_weights(rollout.model)
        assert actual.keys() == expected.keys() and rollout.version == version
        assert all(np.array_equal(array, expected[key]) for key, array in actual.items())
        compared = rollout.compare_weights(weight_samples(actor.language_model, version))
        assert compared.count and not compared.wrong and not compared.unreached
        actor.update(table(11, seed=9), policy_loss, POLICY)


def test_weights_are_cast_after_the_merge(tmp_path: Path) -> None:
    config, actor = policy(tmp_path, "llama, without biases", LORA)
    received: dict[str, np.ndarray] = {}

    class Receiver(ScriptedEngine):
        def receive(self, weights: Mapping[str, np.ndarray]) -> None:
            received.update(weights)

    adapted = AdaptedWeights(config, LORA, CPU)
    adapted.set(to_arrays(actor.export_adapter()))
    settings = RolloutConfig(max_response_tokens=4)
    engine = Receiver(EngineContext(settings, config, tokenizer(), "cpu"))
    adapted.load_into(engine, 1, 500.0, "bfloat16")
    expected = export_weights(actor.language_model, dtype=torch.bfloat16)
    assert received.keys() == expected.keys()
    assert all(np.array_equal(array, expected[key]) for key, array in received.items())


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_starts_with_a_saved_adapter(name: str, tmp_path: Path) -> None:
    config, actor = policy(tmp_path, name, COMPLETE)
    save_adapter(actor.language_model, config.path, tmp_path / "adapter")
    rollout = hf_rollout(ModelConfig(path=tmp_path / "adapter"))
    expected, actual = export_weights(actor.language_model), export_weights(rollout.model)
    assert rollout.version == 0 and actual.keys() == expected.keys()
    assert all(np.array_equal(array, expected[key]) for key, array in actual.items())
