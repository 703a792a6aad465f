"""Real vLLM with asynchronous scheduling, compared with vLLM that schedules each step after the previous one."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from flowrl import Cluster, Placement, WorkerGroup
from flowrl.config import ModelConfig, RolloutConfig, VllmConfig
from flowrl.controller.errors import FlowError
from flowrl.engines.models.weight_samples import weight_samples
from flowrl.engines.models.weights import export_weights
from flowrl.workers import Rollout
from tests.engines import tiny, vllm_checks
from tests.engines.closeness import FLOAT32_RTOL, relative_error
from tests.engines.rollout.vllm import async_on_cpu
from tests.engines.rollout.vllm.test_engine import ARCHITECTURES, PROMPTS, STOPS, Pair
from tests.errors import rejects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

NUM_STEPS = 8


@dataclass
class Groups:
    """Two rollouts with the same model."""

    model: PreTrainedModel
    plain: WorkerGroup
    """A rollout without asynchronous scheduling."""
    ahead: WorkerGroup
    """A rollout with asynchronous scheduling."""
    stops: tuple[tuple[int, ...], ...]
    """Stop sequences of both rollouts."""

    def run(
        self, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> tuple[Any, Any]:  # Any: the function's
        """Returns the results of a function in both rollouts."""
        (expected,), (result,) = (group.run(function, *arguments, **named) for group in (self.plain, self.ahead))
        return expected, result

    def changed_weights(self, seed: int) -> dict[str, Any]:
        """Changes all weights of the model, and returns them."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
        return {name: array.copy() for name, array in export_weights(self.model).items()}

    def reset(self) -> None:
        """Makes the current weights of the model version 0."""
        for group in (self.plain, self.ahead):
            group.load_weights(export_weights(self.model), 0)


@pytest.fixture(scope="module", params=[(), STOPS[::3]], ids=["stop tokens", "stop sequences"])
def groups(
    request: pytest.FixtureRequest, ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Groups]:
    """With stop sequences, vLLM returns the tokens of each step, and otherwise complete responses."""
    folder = tmp_path_factory.mktemp("model")
    config = RolloutConfig(engine="vllm", max_response_tokens=async_on_cpu.LIMIT, stop_ids=request.param)
    with open_groups(folder, save_model(folder), config) as opened:
        yield opened


@contextmanager
def open_groups(folder: Path, model: PreTrainedModel, config: RolloutConfig, **settings: Any) -> Iterator[Groups]:
    """`settings` are those of vLLM in the rollout with asynchronous scheduling."""
    ahead = {"engine": async_on_cpu.NAME, "vllm": VllmConfig(async_scheduling=True, **settings)}
    placement = Placement(device="cpu", pools={"a": [1], "b": [1]}, roles={"rollout": "a", "ahead": "b"})
    with Cluster(placement, dedicated=("rollout", "ahead"), num_threads=1) as cluster:
        plain, other = (
            cluster.group(role, Rollout, config.model_copy(update=update), ModelConfig(path=folder), seed=0)
            for role, update in (("rollout", {}), ("ahead", ahead))
        )
        yield Groups(model, plain, other, config.stop_ids)


def save_model(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["Qwen2, tied"]()).eval()
    tiny.save(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return model


def check_equal(expected: list[dict[str, Any]], responses: list[dict[str, Any]]) -> None:
    """Asserts that responses are equal, except for the rounding of log-probabilities."""
    pairs = list(zip(*(sorted(rows, key=itemgetter("request_id")) for rows in (expected, responses)), strict=True))
    for first, second in pairs:
        assert {**first, "logprobs": None} == {**second, "logprobs": None}
        assert len(first["logprobs"]) == len(first["token_ids"])
    logprobs = [torch.tensor([x for pair in pairs for x in pair[side]["logprobs"]]) for side in (0, 1)]
    assert relative_error(logprobs[1], logprobs[0]) < FLOAT32_RTOL


def test_the_scheduler_the_queue_of_steps_and_the_runner_are_asynchronous(groups: Groups) -> None:
    plain, ahead = groups.run(async_on_cpu.describe_scheduler)
    assert plain == ("CountingScheduler", "step", False)
    assert ahead == ("CountingAsyncScheduler", "step_with_batch_queue", True)


def test_responses_equal_those_without_asynchronous_scheduling(groups: Groups) -> None:
    sampled, greedy = (groups.run(async_on_cpu.generate, PROMPTS, temperature) for temperature in (None, 0.0))
    for expected, responses in (sampled, greedy):
        assert len({len(response["token_ids"]) for response in expected}) > 3, "the requests end in different steps"
        check_equal(expected, responses)
    endings = {tuple(response["token_ids"][-2:]) for response in (*sampled[0], *greedy[0])}
    assert bool(groups.stops) == (not endings.isdisjoint(groups.stops))


def test_tokens_have_the_version_that_sampled_them_across_updates(groups: Groups) -> None:
    """An id is used again while a step of the aborted request is scheduled. A request is read between the updates."""
    updates = {version: groups.changed_weights(version) for version in (1, 2, 3)}
    (expected, partial), (responses, own_partial) = groups.run(
        async_on_cpu.stream_through_updates, PROMPTS, updates, NUM_STEPS
    )
    check_equal(expected, responses)
    check_equal(partial, own_partial)
    assert partial and {len(set(response["versions"])) for response in responses} >= {1, 4}
    groups.reset()


def test_weights_are_compared_between_two_steps(groups: Groups) -> None:
    """The requests continue with their keys and values."""
    groups.run(async_on_cpu.add_requests, PROMPTS)
    samples = weight_samples(groups.model, 0)
    assert groups.run(async_on_cpu.compare_between_steps, samples, NUM_STEPS) == (len(samples.samples),) * 2
    assert groups.run(async_on_cpu.count_scheduled_steps) == (0, 0)
    check_equal(*groups.run(async_on_cpu.finish))


def test_no_step_is_scheduled_while_the_engine_sleeps(groups: Groups) -> None:
    """The last step of `generate` was scheduled before its request ended with the step before."""
    groups.run(async_on_cpu.generate, PROMPTS)
    assert groups.run(async_on_cpu.count_scheduled_steps) == (0, 1)
    assert groups.run(vllm_checks.error_of, "sleep") == ("", "")
    assert groups.run(async_on_cpu.count_scheduled_steps) == (0, 0)
    groups.run(vllm_checks.error_of, "wake")
    check_equal(*groups.run(async_on_cpu.generate, PROMPTS))


def test_sleep_is_rejected_while_requests_run(groups: Groups) -> None:
    groups.run(async_on_cpu.add_requests, PROMPTS)
    messages = groups.run(vllm_checks.error_of, "sleep")
    assert messages[0] == messages[1] != ""
    check_equal(*groups.run(async_on_cpu.finish))


def test_preempted_responses_equal_those_of_a_larger_cache(ray_session: None, tmp_path: Path) -> None:
    """The small cache has 6 blocks of 128 tokens. Each of 6 rows needs a second block after 8 tokens."""
    model = save_model(tmp_path)
    prompts = [[2 + (row + i) % 28 for i in range(120)] for row in range(6)]
    config = RolloutConfig(engine="vllm", max_response_tokens=async_on_cpu.LIMIT)
    small = {"kv_cache_gb": 0.0008, "max_model_len": 256}
    with open_groups(tmp_path, model, config, **small) as groups:
        (expected, none), (responses, several) = groups.run(async_on_cpu.generate_and_count, prompts)
        assert none == 0 < several
        check_equal(expected, responses)
        old = deepcopy(model)
        updates = {1: groups.changed_weights(1)}
        ((responses, _),) = groups.ahead.run(async_on_cpu.stream_through_updates, prompts, updates, 15)
    logprobs, expected = [], []
    for response in responses:
        prompt, tokens, versions = prompts[int(response["request_id"][4:])], response["token_ids"], response["versions"]
        assert versions == sorted(versions) and len(versions) == len(tokens) == len(response["logprobs"])
        before, after = (Pair(groups.ahead, each).logprobs(prompt, tokens) for each in (old, model))
        expected.append(torch.where(torch.tensor(versions) == 0, before, after))
        logprobs.append(torch.tensor(response["logprobs"]))
    assert {version for response in responses for version in response["versions"]} == {0, 1}
    assert relative_error(torch.cat(logprobs), torch.cat(expected)) < FLOAT32_RTOL


def test_asynchronous_scheduling_is_rejected_if_vllm_disables_it(ray_session: None, tmp_path: Path) -> None:
    save_model(tmp_path)
    config = RolloutConfig(engine="vllm", max_response_tokens=8, vllm=VllmConfig(async_scheduling=True))
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    with (
        Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster,
        rejects("vllm.async_scheduling", "GPUs", "auto", error=FlowError),
    ):
        cluster.group("rollout", Rollout, config, ModelConfig(path=tmp_path), seed=0).run(vllm_checks.state)
