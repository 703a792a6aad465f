"""Real vLLM in a dedicated process, compared with transformers on the same weights."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ModelConfig, RolloutConfig, VllmConfig
from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.controller.worker import Worker
from flowrl.engines.models.weights import export_weights, weight_buckets, weight_shapes
from flowrl.workers import Rollout
from tests.engines import tiny, vllm_checks
from tests.engines.closeness import FLOAT32_RTOL, relative_error
from tests.engines.tiny import END
from tests.errors import missing_facts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

RESPONSE = 12
STOPS = tuple((first, first + step) for first in range(2, 20) for step in (1, 2, 3))
SIZES = {**tiny.SIZES, "hidden_size": 128, "max_position_embeddings": 512}
"""vLLM's attention on the CPU takes heads of 32 and more."""

ARCHITECTURES = {
    "Qwen2, tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "LLaMA": lambda: LlamaConfig(**SIZES),
    "Qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "Mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0]
    ),
}

TF32_RTOL = 2**-10
"""Spacing of TF32 numbers, in which GPU kernels may multiply float32."""

PROMPTS = [[2 + (row + i) % 28 for i in range(3 + row)] for row in range(9)]


@dataclass
class Pair:
    """A rollout, and the model that its weights come from."""

    group: WorkerGroup
    model: PreTrainedModel
    version: int = 0
    messages: list[str] = field(default_factory=list)
    """What a run would show its user."""

    def sync(self, seed: int) -> None:
        """Changes every weight and sends them."""
        self.change(seed)
        self.group.load_weights(export_weights(self.model), self.version)

    def change(self, seed: int) -> None:
        """Changes every weight and increments the version."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
        self.version += 1

    def send(self) -> None:
        self.version += 1
        self.group.load_weights(export_weights(self.model), self.version)

    def generate(self, prompts: list[list[int]], rows: list[int] | None = None, *, greedy: bool = False) -> dict:
        (responses,) = self.group.run(vllm_checks.generate, prompts, rows or list(range(len(prompts))), greedy=greedy)
        return responses

    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits_LV = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits_LV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None]).squeeze(1)

    def most_likely(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """Returns the model's most likely token at the position of each token."""
        with torch.no_grad():
            logits_LV = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits_LV[len(prompt) - 1 : -1].argmax(-1).tolist()

    def relative_error(self, prompts: list[list[int]], responses: dict) -> float:
        """Returns the relative error of all log-probabilities, compared with the model's own."""
        expected = torch.cat(list(map(self.logprobs, prompts, responses["tokens"])))
        return relative_error(torch.tensor([logprob for row in responses["logprobs"] for logprob in row]), expected)


@contextmanager
def open_pair(
    folder: Path, architecture: str, stops: tuple[tuple[int, ...], ...] = STOPS, vllm: VllmConfig | None = None
) -> Iterator[Pair]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    tiny.save(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = RolloutConfig(engine="vllm", max_response_tokens=RESPONSE, stop_ids=stops, vllm=vllm)
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    messages: list[str] = []
    with Cluster(placement, dedicated=("rollout",), num_threads=1, notify=messages.append) as cluster:
        yield Pair(
            cluster.group("rollout", Rollout, config, ModelConfig(path=folder), seed=0), model, messages=messages
        )


@pytest.fixture(scope="module")
def pair(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair(tmp_path_factory.mktemp("vllm"), "Qwen2, tied") as opened:
        yield opened


def test_the_engine_implements_the_protocols_of_its_capabilities(pair: Pair) -> None:
    assert pair.group.run(vllm_checks.missing_methods) == [[]]


def test_the_capabilities_name_the_head_sizes_of_the_attention(pair: Pair) -> None:
    assert pair.group.run(vllm_checks.cpu_head_sizes) == [ENGINES["vllm"].head_sizes["cpu"]]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if "Qwen2" in name else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_responses_match_transformers_before_and_after_updates(architecture: str, pair: Pair, tmp_path: Path) -> None:
    is_shared = architecture == "Qwen2, tied"
    with nullcontext(pair) if is_shared else open_pair(tmp_path / "model", architecture) as tried:
        for seed in range(6):
            if seed:
                tried.sync(seed)
            responses = tried.generate(PROMPTS)
            assert tried.relative_error(PROMPTS, responses) < FLOAT32_RTOL
            assert {version for row in responses["versions"] for version in row} == {tried.version}
            greedy = tried.generate(PROMPTS, greedy=True)
            assert tried.relative_error(PROMPTS, greedy) < FLOAT32_RTOL
            for prompt, tokens in zip(PROMPTS, greedy["tokens"], strict=True):
                assert tried.most_likely(prompt, tokens) == tokens


def test_weights_arrive_in_shared_buffers(pair: Pair) -> None:
    pair.change(6)
    pair.group.run(vllm_checks.load_from_buffers, export_weights(pair.model), pair.version)
    responses = pair.generate(PROMPTS)
    assert pair.relative_error(PROMPTS, responses) < FLOAT32_RTOL
    assert {version for row in responses["versions"] for version in row} == {pair.version}


def test_a_response_does_not_depend_on_the_batch_but_on_the_sample(pair: Pair) -> None:
    together = pair.generate(PROMPTS)["tokens"]
    alone = [pair.generate([prompt], [row])["tokens"][0] for row, prompt in enumerate(PROMPTS[:3])]
    assert together[:3] == alone
    assert pair.generate(PROMPTS, [100 + row for row in range(len(PROMPTS))])["tokens"] != together


def test_a_response_ends_with_a_stop_token_or_stop_sequence(pair: Pair) -> None:
    prompts = [[2 + row % 28, 3] for row in range(200)]
    responses = pair.generate(prompts)
    ended_by_sequence = 0
    for tokens, truncated in zip(responses["tokens"], responses["truncated"], strict=True):
        stopped = tokens[-1] == END or tuple(tokens[-2:]) in STOPS
        assert truncated == (not stopped)
        assert len(tokens) == RESPONSE or stopped
        inner = tokens[:-1]
        assert END not in inner and not set(STOPS) & set(pairwise(inner))
        ended_by_sequence += tuple(tokens[-2:]) in STOPS
    assert ended_by_sequence, "no row tried it"


def test_a_failed_update_breaks_the_engine_until_a_complete_one(pair: Pair) -> None:
    first = dict(list(export_weights(pair.model).items())[:5])
    (message,) = pair.group.run(vllm_checks.send_unknown_weight, first)
    assert "nothing" in message
    assert pair.group.run(vllm_checks.state) == ["broken"]
    (message,) = pair.group.run(vllm_checks.error_of, "poll")
    assert "broken" in message
    pair.send()
    assert pair.relative_error(PROMPTS, pair.generate(PROMPTS)) < FLOAT32_RTOL
    names = list(export_weights(pair.model))
    (missing,) = pair.group.run(vllm_checks.commit_incomplete_update, first)
    assert not missing_facts(missing, len(names) - len(first))
    assert pair.group.run(vllm_checks.state) == ["broken"]
    pair.group.run(vllm_checks.abort_update, first)
    assert pair.group.run(vllm_checks.state) == ["broken"]
    pair.sync(20)
    assert pair.relative_error(PROMPTS, pair.generate(PROMPTS)) < FLOAT32_RTOL


def test_keys_and_values_of_old_weights_are_discarded(pair: Pair) -> None:
    """Without the reset of the prefix cache, the same prompts give wrong log-probabilities."""
    long = [[2 + (row * 5 + i) % 28 for i in range(400)] for row in range(4)]
    errors = []
    for keeps_cache in (False, True):
        pair.generate(long)
        pair.group.run(vllm_checks.keep_stale_cache, True) if keeps_cache else None
        pair.sync(30 + keeps_cache)
        errors.append(pair.relative_error(long, pair.generate(long)))
    pair.group.run(vllm_checks.keep_stale_cache, False)
    pair.send()
    assert errors[0] < FLOAT32_RTOL < 10 * FLOAT32_RTOL < errors[1]


@pytest.mark.parametrize(
    "stops", [STOPS, pytest.param(((5,),), marks=pytest.mark.slow)], ids=["stop sequences", "stop tokens"]
)
def test_running_requests_continue_with_new_weights_and_tokens_have_their_version(
    stops: tuple[tuple[int, ...], ...], pair: Pair, tmp_path: Path
) -> None:
    """With stop sequences vLLM returns token deltas, without them complete responses."""
    with nullcontext(pair) if stops is STOPS else open_pair(tmp_path / "model", "Qwen2, tied", stops) as tried:
        check_running_requests_continue(tried)


def check_running_requests_continue(pair: Pair) -> None:
    before = export_weights(pair.model)
    old = pair.version
    pair.model.load_state_dict({n: w + 0.05 * torch.randn_like(w) for n, w in pair.model.state_dict().items()})
    pair.version += 1
    (responses,) = pair.group.run(vllm_checks.stream_requests, PROMPTS, export_weights(pair.model), pair.version, 5)
    assert sorted(response["request_id"] for response in responses) == [f"row-{row}" for row in range(len(PROMPTS) - 1)]
    mixed = [response for response in responses if len(set(response["versions"])) == 2]
    assert mixed, "no row was running when the weights came"
    for response in mixed:
        prompt, tokens, number = (
            PROMPTS[int(response["request_id"][4:])],
            response["token_ids"],
            response["versions"].count(old),
        )
        assert response["versions"] == [old] * number + [pair.version] * (len(tokens) - number)
        logprobs = torch.tensor(response["logprobs"])
        assert relative_error(logprobs[number:], pair.logprobs(prompt, tokens)[number:]) < FLOAT32_RTOL
        other = AutoModelForCausalLM.from_config(pair.model.config).eval()
        other.load_state_dict({n: torch.from_numpy(w) for n, w in before.items()}, strict=False)
        old_logprobs = Pair(pair.group, other).logprobs(prompt, tokens)
        assert relative_error(logprobs[:number], old_logprobs[:number]) < FLOAT32_RTOL


def test_a_segment_follows_the_prompt_and_all_earlier_segments(pair: Pair) -> None:
    """New weights arrive between the tokens of continued responses."""
    other = AutoModelForCausalLM.from_config(pair.model.config).eval()
    other.load_state_dict(pair.model.state_dict())
    old = Pair(pair.group, other, pair.version)
    pair.change(50)
    arguments = (PROMPTS, export_weights(pair.model), pair.version, 3)
    (responses,) = pair.group.run(vllm_checks.stream_segments, *arguments)
    assert len(responses) == len(PROMPTS) and any(len(set(response["versions"])) == 2 for response in responses)
    for response in responses:
        context, tokens = list(response["context"]), response["token_ids"]
        row = int(response["request_id"].removeprefix("row-"))
        num_tokens = len(context) - len(PROMPTS[row]) + len(tokens)
        assert num_tokens == RESPONSE if response["truncated"] else num_tokens <= RESPONSE
        logprobs, count = torch.tensor(response["logprobs"]), response["versions"].count(old.version)
        assert response["versions"] == [old.version] * count + [pair.version] * (len(tokens) - count)
        expected = torch.cat((old.logprobs(context, tokens)[:count], pair.logprobs(context, tokens)[count:]))
        assert relative_error(logprobs, expected) < FLOAT32_RTOL


def test_the_second_turn_of_an_episode_reads_the_first_from_the_prefix_cache(pair: Pair) -> None:
    """The cache has complete blocks only, of 128 tokens on the CPU."""
    prompt = [2 + (3 * i) % 28 for i in range(300)]
    ((num_tokens, num_cached),) = pair.group.run(vllm_checks.count_cached_tokens, prompt, [7, 9])
    assert 256 <= num_cached < num_tokens


def test_operations_are_rejected_in_the_wrong_state(pair: Pair) -> None:
    pair.group.run(vllm_checks.error_of, "sleep")
    assert pair.group.run(vllm_checks.state) == ["asleep"]
    for method, arguments in (("poll", ()), ("begin_update", (9,)), ("sleep", ())):
        (message,) = pair.group.run(vllm_checks.error_of, method, arguments)
        assert " asleep " in message
    assert pair.group.run(vllm_checks.error_of, "wake") == [""]
    for method in ("receive", "commit", "abort_update", "wake"):
        arguments = ({},) if method == "receive" else ()
        (message,) = pair.group.run(vllm_checks.error_of, method, arguments)
        assert " serving" in message
    assert pair.relative_error(PROMPTS, pair.generate(PROMPTS)) < FLOAT32_RTOL


def check_sleep_by_tags(pair: Pair) -> None:
    """Updates an engine whose KV cache is asleep; the responses afterwards use the new weights."""
    pair.generate(PROMPTS)
    generator = torch.Generator().manual_seed(40)
    with torch.no_grad():
        for weight in pair.model.parameters():
            weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
    pair.version += 1
    (states,) = pair.group.run(vllm_checks.update_asleep, export_weights(pair.model), pair.version)
    assert [next(state for state in ("asleep", "updating", "serving") if state in each) for each in states] == [
        *["asleep"] * 5,
        "updating",
        *["asleep"] * 6,
        "serving",
    ]
    responses = pair.generate(PROMPTS)
    assert pair.relative_error(PROMPTS, responses) < FLOAT32_RTOL
    assert {version for row in responses["versions"] for version in row} == {pair.version}


def test_an_update_needs_only_the_weights_awake(pair: Pair) -> None:
    check_sleep_by_tags(pair)


def test_an_engine_that_dropped_its_weights_generates_after_a_complete_update(pair: Pair) -> None:
    pair.group.run(vllm_checks.drop_weights)
    assert pair.group.run(vllm_checks.state) == ["asleep"]
    assert pair.group.run(vllm_checks.error_of, "wake") == [""]
    assert pair.group.run(vllm_checks.state) == ["broken"]
    (message,) = pair.group.run(vllm_checks.error_of, "poll")
    assert "broken" in message
    pair.send()
    assert pair.relative_error(PROMPTS, pair.generate(PROMPTS)) < FLOAT32_RTOL


def test_a_broken_engine_is_still_broken_after_sleep(pair: Pair) -> None:
    pair.group.run(vllm_checks.send_unknown_weight, dict(list(export_weights(pair.model).items())[:5]))
    for method in ("sleep", "wake"):
        assert pair.group.run(vllm_checks.error_of, method) == [""]
    assert pair.group.run(vllm_checks.state) == ["broken"]
    pair.send()
    assert pair.relative_error(PROMPTS, pair.generate(PROMPTS)) < FLOAT32_RTOL


@pytest.mark.slow
def test_200_updates_do_not_leak_memory(pair: Pair) -> None:
    weights = export_weights(pair.model)
    (sizes,) = pair.group.run(vllm_checks.updates, weights, 200)
    weight_bytes = sum(array.nbytes for array in weights.values())
    assert sizes[-1] - sizes[20] < 20 * weight_bytes, "180 updates kept more than a ninth of the weights each"
    assert pair.generate(PROMPTS)["versions"][0][0] == 199
    pair.send()


@pytest.mark.parametrize(("prompt", "message"), [([], "prompt 0"), ([2] * 510, "prompt 0 has 510 tokens, 522 with")])
def test_a_prompt_that_does_not_fit_is_rejected(prompt: list[int], message: str, pair: Pair) -> None:
    (error,) = pair.group.run(vllm_checks.prompt_error, prompt)
    assert error.startswith(message)


def batch_of(rows: int) -> Batch:
    return Batch.from_rows([{"prompt_ids": PROMPTS[row % 9], "prompt_id": row, "sample": 0} for row in range(rows)])


def kill(pair: Pair) -> None:
    (process_id,) = pair.group.run(vllm_checks.process_id)
    os.kill(process_id, signal.SIGKILL)


@pytest.mark.slow
def test_a_process_killed_during_generation_is_recovered_with_the_same_responses(pair: Pair) -> None:
    pair.sync(40)
    batch = batch_of(400)
    expected = pair.group.generate(batch).get("input_ids").tolist()
    (process_id,) = pair.group.run(vllm_checks.process_id)
    del pair.messages[:]
    pair.group.run(vllm_checks.dies_while_generating, 4)
    batch_of_responses = pair.group.generate(batch)
    responses = batch_of_responses.get("input_ids").tolist()
    assert pair.group.run(vllm_checks.process_id) != [process_id]
    assert responses == expected
    assert set(batch_of_responses.get("weight_version").tolist()) == {-1, pair.version}
    assert not missing_facts(pair.messages[0], "rollout", "rank", "node", 0, "generate"), pair.messages


@pytest.mark.slow
def test_a_process_killed_during_an_update_gets_all_buckets_again(pair: Pair) -> None:
    pair.sync(41)
    old = pair.version
    before = pair.group.generate(batch_of(9))
    pair.change(42)
    parts = [export_weights(pair.model, names) for names in weight_buckets(weight_shapes(pair.model), 50_000)]
    assert len(parts) > 3
    pair.group.load_weights(parts[0], pair.version, 0, len(parts)).get()
    pair.group.load_weights(parts[1], pair.version, 1, len(parts))
    kill(pair)
    for bucket, part in enumerate(parts[2:], 2):
        pair.group.load_weights(part, pair.version, bucket, len(parts))
    assert set(before.get("weight_version").tolist()) == {-1, old}
    responses = pair.generate(PROMPTS)
    assert {version for row in responses["versions"] for version in row} == {pair.version}
    assert pair.relative_error(PROMPTS, responses) < FLOAT32_RTOL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_processes_free_their_memory_for_each_other(ray_session: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["LLaMA"]()).eval()
    tiny.save(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = RolloutConfig(engine="vllm", max_response_tokens=RESPONSE, vllm=VllmConfig(kv_cache_gb=4.0))
    placement = Placement(device="cuda", pools={"main": [1]}, roles=dict.fromkeys(("actor", "rollout"), "main"))
    with Cluster(placement, dedicated=("rollout",)) as cluster:
        actor = cluster.group("actor", Worker)
        pair = Pair(cluster.group("rollout", Rollout, config, ModelConfig(path=tmp_path / "model"), seed=0), model)
        actor.run(vllm_checks.use_memory, 1)
        free_awake = []
        for seed in range(3):
            free_awake += pair.group.run(vllm_checks.free_memory)
            (asleep,) = actor.run(vllm_checks.use_memory, 2**31)
            assert asleep - free_awake[-1] > 3.9e9
            pair.sync(seed)
            assert pair.relative_error(PROMPTS, pair.generate(PROMPTS, greedy=True)) < TF32_RTOL
        assert free_awake[0] - min(free_awake) < 2**28, "the actor's process keeps the memory of its tensor"


@pytest.mark.slow
def test_responses_that_do_not_fit_into_the_kv_cache_together_are_preempted(ray_session: None, tmp_path: Path) -> None:
    """A token needs 1,024 bytes. The cache has 6 blocks of 128 tokens, and each of 6 rows needs 2 blocks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["LLaMA"]())
    model.lm_head.weight.data[END] = 0  # other logits are larger, so that no response ends early
    tiny.save(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = RolloutConfig(
        engine="vllm", max_response_tokens=200, vllm=VllmConfig(kv_cache_gb=0.0008, max_model_len=512)
    )
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"rollout": "main"})
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        rollout = cluster.group("rollout", Rollout, config, ModelConfig(path=tmp_path / "model"), seed=0)
        for num_rows in (2, 6):
            prompts = [[2 + row] * 20 for row in range(num_rows)]
            rows = {"prompt_ids": prompts, "prompt_id": list(range(num_rows))}
            rollout.generate(Batch.from_columns(rows=rows), temperature=0.0).get("input_ids")
        usage = [event.usage for event in cluster.calls.events if event.method == "generate"]
    assert [(own["responses"], own["tokens"]) for own in usage] == [(2, 400), (6, 1200)]
    assert usage[0]["preemptions"] == 0 and usage[1]["preemptions"] >= 1


def test_rejected_requests_leave_no_state(pair: Pair) -> None:
    (messages,) = pair.group.run(vllm_checks.add_invalid_requests, 510)
    assert not missing_facts(messages[0], "prompt", 0, 510, 522)
    assert not missing_facts(messages[1], "one")
    assert messages[2] == "0"


def test_generate_runs_while_requests_are_streaming(pair: Pair) -> None:
    alone = pair.generate(PROMPTS)
    ((responses, names),) = pair.group.run(vllm_checks.generate_while_streaming, PROMPTS, list(range(len(PROMPTS))))
    assert responses["tokens"] == alone["tokens"]
    assert set(names) - {"row-0"} == {f"row-{row}" for row in range(1, len(PROMPTS))} and len(names) == len(set(names))


def test_an_evaluation_runs_while_groups_are_streaming(pair: Pair) -> None:
    batch, held_out = batch_of(6), batch_of(4)
    expected = pair.group.generate(held_out, temperature=0.0).get("input_ids").tolist()
    pair.group.add(batch, 1)
    pair.group.start_evaluation(held_out, 0.0).get()
    ids: list[int] = []
    while not (evaluation := pair.group.poll_evaluation(0.05)).num_rows:
        ids += pair.group.poll(0.05).get("prompt_id").tolist()
    assert evaluation.get("input_ids").tolist() == expected
    while len(ids) < 6:
        ids += pair.group.poll(0.5).get("prompt_id").tolist()
    assert sorted(ids) == list(range(6))


def test_generate_runs_while_an_evaluation_is_pending(pair: Pair) -> None:
    held_out, other = batch_of(4), batch_of(3)
    expected = [pair.group.generate(batch, temperature=0.0).get("input_ids").tolist() for batch in (held_out, other)]
    pair.group.start_evaluation(held_out, 0.0).get()
    assert pair.group.poll_evaluation(0.0).num_rows == 0
    assert pair.group.generate(other, temperature=0.0).get("input_ids").tolist() == expected[1]
    while not (evaluation := pair.group.poll_evaluation(0.05)).num_rows:
        pass
    assert evaluation.get("input_ids").tolist() == expected[0]


def test_complete_groups_equal_the_rows_of_generate(pair: Pair) -> None:
    batch = batch_of(9)
    generated = pair.group.generate(batch)
    expected = dict(zip(range(9), generated.get("input_ids").split(generated.lengths().tolist()), strict=True))
    pair.group.add(batch, 1)
    responses = []
    while sum(piece.num_rows for piece in responses) < 9:
        responses.append(pair.group.poll(0.5))
    for piece in responses:
        rows = piece.get("input_ids").split(piece.lengths().tolist())
        assert all(torch.equal(row, expected[n]) for n, row in zip(piece.get("prompt_id").tolist(), rows, strict=True))
    pair.group.add(batch, 1)
    pair.group.poll(0.0)
    old = pair.version
    pair.send()
    responses = [pair.group.poll(0.5) for _ in range(9)]
    versions = torch.cat([piece.get("weight_version")[piece.get("response_mask")] for piece in responses])
    assert set(versions.tolist()) == {old, pair.version}
    pair.group.abort_all()
    assert pair.group.poll(0.0).num_rows == 0


@pytest.mark.slow
def test_no_environment_makes_vllm_compute_float32_products_in_tf32() -> None:
    code = (
        "import os, flowrl.engines.rollout.vllm.engine, vllm.envs as settings\n"
        "print(settings.VLLM_FLOAT32_MATMUL_PRECISION, os.environ['TRITON_F32_DEFAULT'])"
    )
    stated = {"VLLM_FLOAT32_MATMUL_PRECISION": "medium", "TRITON_F32_DEFAULT": "tf32"}
    completed = subprocess.run([sys.executable, "-c", code], env=os.environ | stated, capture_output=True, check=True)
    assert completed.stdout.split() == [b"highest", b"ieee"]
