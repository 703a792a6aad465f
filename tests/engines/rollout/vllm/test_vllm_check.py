"""Weight checks with real vLLM: correct weights pass, and wrong ones are named."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from flowrl import Cluster, Placement, WorkerGroup
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.engines.models.weight_samples import weight_samples
from flowrl.engines.models.weights import export_weights
from flowrl.workers import Rollout
from tests.engines import tiny, vllm_checks
from tests.engines.rollout.vllm.test_engine import ARCHITECTURES as MIXTURES
from tests.errors import missing_facts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

SIZES = {**tiny.SIZES, "hidden_size": 128, "max_position_embeddings": 512}
ARCHITECTURES = {
    "LLaMA": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "Qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "Qwen2, bfloat16": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
}


@dataclass
class Served:
    """A model and the vLLM rollout that serves it."""

    group: WorkerGroup
    model: PreTrainedModel
    version: int = 0
    sent: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, lr: float = 1e-6) -> None:
        """Takes one Adam step, which moves each weight with a gradient by about `lr`."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr)
        self.model(torch.arange(32)[None], labels=torch.arange(32)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def send(self, **instead: np.ndarray) -> None:
        """Sends the weights; `instead` replaces some of them."""
        self.version += 1
        self.sent = export_weights(self.model)
        self.group.load_weights(self.sent | instead, self.version)

    def fault(self, version: int | None = None) -> str:
        """Returns the error of a weight check; `version` selects the samples."""
        samples = weight_samples(self.model, self.version if version is None else version)
        samples = type(samples)(self.version, samples.samples)
        (message,) = self.group.run(vllm_checks.weight_fault, samples)
        return message

    def all_pass(self) -> int:
        """Checks samples of two versions and all weights; returns the number of weights."""
        assert self.fault(0) == self.fault(1) == ""
        samples = weight_samples(self.model, self.version, num_subsets=1)
        ((count, unreached, _),) = self.group.run(vllm_checks.comparison, samples)
        assert unreached == ()
        return count


@contextmanager
def serving(folder: Path, config: Any, dtype: Literal["float32", "bfloat16"] = "float32") -> Iterator[Served]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    tiny.save(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    settings = RolloutConfig(engine="vllm", max_response_tokens=4)
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        path = ModelConfig(path=folder, dtype=dtype)
        yield Served(cluster.group("rollout", Rollout, settings, path, seed=0), model)


@pytest.fixture(scope="module")
def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("vllm"), Qwen2Config(**SIZES, tie_word_embeddings=True)) as opened:
        yield opened


def test_correct_weights_pass_before_and_after_updates(served: Served) -> None:
    for _ in range(3):
        assert served.all_pass() == len(served.model.state_dict())
        served.step()
        served.send()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "unreached"),
    [
        ("Mixtral", ("mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")),
        ("Qwen3-MoE", ("experts.gate_up_proj", "experts.down_proj")),
    ],
)
def test_all_weights_of_a_mixture_but_those_of_experts_are_compared(
    ray_session: None, tmp_path: Path, architecture: str, unreached: tuple[str, ...]
) -> None:
    """vLLM stores experts in other layouts. It has another name for the routers of Mixtral."""
    with serving(tmp_path / "model", MIXTURES[architecture]()) as other:
        for _ in range(2):
            samples = weight_samples(other.model, other.version, num_subsets=1)
            ((count, found, _),) = other.group.run(vllm_checks.comparison, samples)
            names = list(other.model.state_dict())
            assert set(found) == {name for name in names if name.endswith(unreached)}
            assert found and count == len(names) - len(found)
            other.step(0.01)
            other.send()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_correct_weights_pass_and_swapped_ones_are_named(ray_session: None, tmp_path: Path, architecture: str) -> None:
    dtype = "bfloat16" if "bfloat16" in architecture else "float32"
    with serving(tmp_path / "model", ARCHITECTURES[architecture](), dtype) as other:
        for _ in range(2):
            assert other.all_pass() == len(other.model.state_dict())
            other.step(0.01)
            other.send()
        attention, suffix = "model.layers.0.self_attn", "|bfloat16" if dtype == "bfloat16" else ""
        first = "q_proj" if architecture == "LLaMA" else "v_proj"
        names = [f"{attention}.{part}.weight{suffix}" for part in (first, "k_proj")]
        other.send(**dict(zip(names, [other.sent[name] for name in reversed(names)], strict=True)))
        message = other.fault(0)
        assert all(name.removesuffix(suffix) in message for name in names) and not missing_facts(message, 2)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_weight_that_missed_one_small_step_is_named(served: Served, name: str) -> None:
    served.send()
    stale = served.sent[name]
    served.step()
    served.send(**{name: stale})
    message = served.fault(1)
    assert not missing_facts(message, "version", served.version, 1, name)
    served.send()
    assert served.fault(1) == ""


def test_a_missing_update_is_reported(served: Served) -> None:
    served.send()
    before = deepcopy(served.model.state_dict())
    served.step()
    num_wrong, num_compared = re.findall(r"\b(\d+) of (\d+)\b", served.fault())[0]
    assert num_wrong == num_compared
    served.version += 1
    served.model.load_state_dict(before)
    message = served.fault()
    assert str(served.version - 1) in message and str(served.version) in message
    served.version -= 1


def test_a_stale_tied_head_is_named(served: Served) -> None:
    served.send()
    served.group.run(vllm_checks.set_tied, False)
    served.step()
    served.send()
    message = served.fault()
    assert not missing_facts(message, 1, "lm_head.weight")
    served.group.run(vllm_checks.set_tied, True)
    served.send()
    assert served.fault() == ""


def test_a_missing_bias_is_named(served: Served) -> None:
    served.send()
    served.group.run(vllm_checks.zero_biases)
    message = served.fault(0)
    assert not missing_facts(message, 3, "model.layers.0.self_attn.q_proj.bias")
    assert served.fault(1) == ""
    served.send()
    assert served.fault(0) == ""


def test_weights_that_cannot_be_compared_are_counted(served: Served) -> None:
    served.send()
    samples = weight_samples(served.model, served.version)
    other = replace(
        samples.samples[-1], name="model.rotary.weight", kind="plain", inputs=(), bits=np.zeros(3, np.float32)
    )
    ((count, unreached, _),) = served.group.run(
        vllm_checks.comparison, type(samples)(served.version, (*samples.samples, other))
    )
    assert (count, unreached) == (len(samples.samples), ("model.rotary.weight",))
