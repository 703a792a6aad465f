"""Continuous batching: responses equal those of `generate`, and every token has the version that sampled it."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from flowrl.engines.models.weights import export_weights
from flowrl.engines.rollout.base import Request, Response, RolloutError, Segment
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from tests.engines.losses import policy_logits
from tests.engines.rollout.hf.test_engine import generate, prompts, rollout, rows_of
from tests.engines.tiny import END, llama, qwen2, to_float64

RowTokens = dict[str, tuple[list[int], list[float]]]


def requests(prompt_ids: list[list[int]], *, greedy: bool = False) -> list[Request]:
    """Returns the requests of `tests.engines.rollout.hf.test_engine.generate`."""
    ids = torch.arange(len(prompt_ids))
    return make_requests(prompt_ids, ids, ids % 3, seed=5, temperature=0.0 if greedy else None)


def generated(engine: HfRollout, prompt_ids: list[list[int]], **settings) -> RowTokens:
    """Returns the rows of one call of `generate`, by request id."""
    return {f"generate-{row}": tokens for row, tokens in enumerate(rows_of(generate(engine, prompt_ids, **settings)))}


def by_id(responses: Sequence[Response]) -> RowTokens:
    return {response.request_id: (response.token_ids, response.logprobs) for response in responses}


def finish(engine: HfRollout) -> list[Response]:
    responses = []
    while engine.num_running:
        responses += engine.poll()
    return responses


def update(engine: HfRollout, model: PreTrainedModel, version: int) -> None:
    engine.begin_update(version)
    engine.receive(export_weights(model))
    engine.commit()


@pytest.mark.parametrize("max_num_seqs", [1, 7, 20, 64])
@pytest.mark.parametrize("build", [qwen2, llama])
def test_responses_are_bitwise_identical_to_generate_in_any_order_of_arrival(
    build: Callable[[], PreTrainedModel], max_num_seqs: int
) -> None:
    prompt_ids = [prompt for prompt in prompts(30) for _ in range(2)]
    expected = generated(rollout(build()), prompt_ids)
    engine, chance, responses = rollout(build(), max_num_seqs=max_num_seqs), random.Random(max_num_seqs), []
    coming = requests(prompt_ids)
    while coming or engine.num_running:
        count = chance.choice([0, 1, 1, 9])
        engine.add(coming[:count])
        del coming[:count]
        responses += engine.poll(0.0)
    assert by_id(responses) == expected and len({len(ids) for ids, _ in expected.values()}) > 3


def test_long_and_short_rows_are_bitwise_identical_to_generate() -> None:
    settings = {"max_response_tokens": 70, "temperature": 1.5}
    prompt_ids = prompts(24, longest=50)
    expected = generated(rollout(**settings), prompt_ids)
    engine, responses = rollout(max_num_seqs=5, **settings), []
    for prompt in requests(prompt_ids):
        engine.add([prompt])
        responses += engine.poll(0.0)
    assert by_id(responses + finish(engine)) == expected


def test_rows_of_one_token_join_rows_that_decode() -> None:
    prompt_ids = [[5], *prompts(20), [6], [7]]
    expected = generated(rollout(), prompt_ids)
    engine = rollout()
    first, *others = requests(prompt_ids)
    engine.add([first])
    responses = engine.poll(0.0)
    engine.add(others)
    assert by_id(responses + finish(engine)) == expected


def test_greedy_and_sampled_rows_decode_together() -> None:
    prompt_ids = prompts(20)
    sampled, greedy = generated(rollout(), prompt_ids), generated(rollout(), prompt_ids, greedy=True)
    engine = rollout()
    engine.add(requests(prompt_ids)[::2] + requests(prompt_ids, greedy=True)[1::2])
    expected = {name: (sampled if row % 2 == 0 else greedy)[name] for row, name in enumerate(sampled)}
    assert by_id(finish(engine)) == expected


def test_a_stop_sequence_ends_a_request() -> None:
    prompt_ids = prompts(60)
    stops = next((tuple(ids[3:5]),) for ids in generate(rollout(), prompt_ids).token_lists() if len(ids) > 6)
    engine = rollout(stop_ids=stops, max_num_seqs=16)
    expected = generate(rollout(stop_ids=stops), prompt_ids)
    engine.add(requests(prompt_ids))
    responses = {response.request_id: response for response in finish(engine)}
    in_order = [responses[f"generate-{row}"] for row in range(60)]
    assert [response.token_ids for response in in_order] == expected.token_lists()
    assert [response.truncated for response in in_order] == expected.truncated.tolist()
    assert any(tuple(ids[-2:]) in stops and ids[-1] != END for ids in expected.token_lists())


def test_aborted_requests_return_nothing_and_do_not_affect_others() -> None:
    prompt_ids = prompts(40)
    expected = generated(rollout(), prompt_ids)
    engine = rollout(max_num_seqs=16)
    engine.add(requests(prompt_ids))
    responses = engine.poll(0.0) + engine.poll(0.0)
    dropped = {f"generate-{row}" for row in (*range(0, 40, 7), 39)} - {response.request_id for response in responses}
    engine.abort([*dropped, "no request"])
    assert engine.num_running == 40 - len(responses) - len(dropped)
    assert by_id(responses + finish(engine)) == {name: row for name, row in expected.items() if name not in dropped}


def test_requests_can_be_added_after_all_were_aborted() -> None:
    engine = rollout()
    engine.add(requests(prompts(20)))
    engine.poll(0.0)
    engine.abort([f"generate-{row}" for row in range(20)])
    assert engine.num_running == 0 and engine.poll() == []
    engine.add(requests(prompts(6, seed=1)))
    assert by_id(finish(engine)) == generated(rollout(), prompts(6, seed=1))


def test_generate_and_streaming_do_not_affect_each_other() -> None:
    prompt_ids, others = prompts(30), prompts(9, seed=1)
    expected, greedy_expected = generated(rollout(), prompt_ids), generated(rollout(), others, greedy=True)
    engine = rollout(max_num_seqs=16)
    engine.add(requests(prompt_ids))
    responses = engine.poll(0.0)
    # Both use the same request ids.
    assert generated(engine, others, greedy=True) == greedy_expected
    assert by_id(responses + finish(engine)) == expected


def test_rows_continue_with_new_weights_and_tokens_have_their_version() -> None:
    # float64, so that rounding does not hide an error.
    models = [to_float64(qwen2(seed=seed)) for seed in range(4)]
    engine, prompt_ids = rollout(to_float64(qwen2()), max_response_tokens=40, max_num_seqs=20), prompts(50)
    engine.add(requests(prompt_ids))
    responses: list[Response] = []
    for version, model in enumerate(models):
        if version:
            update(engine, model, version)
        for _ in range(7):
            responses += engine.poll(0.0)
    responses += finish(engine)
    assert sorted(response.request_id for response in responses) == sorted(f"generate-{row}" for row in range(50))
    assert max(len(set(response.versions)) for response in responses) == 4
    for response in responses:
        assert response.versions == sorted(response.versions)
        check_logprobs(response, prompt_ids[int(response.request_id.removeprefix("generate-"))], models)


def check_logprobs(sampled: Response | Segment, before: list[int], models: list) -> None:
    """Compares the log-probability of each sampled token with that of the model of its version.

    `before` are the tokens before the sampled ones.
    """
    assert sampled.logprobs is not None and sampled.versions is not None
    row = torch.tensor([before + list(sampled.token_ids)])
    with torch.no_grad():
        logprobs_vL = [policy_logits(model, row)[0].log_softmax(-1)[len(before) - 1 : -1] for model in models]
    for position, (token, logprob, version) in enumerate(
        zip(sampled.token_ids, sampled.logprobs, sampled.versions, strict=True)
    ):
        assert logprob == pytest.approx(float(logprobs_vL[version][position, token]), rel=1e-5)


def test_a_stop_sequence_across_two_versions_ends_a_response() -> None:
    prompt_ids = prompts(60)
    free = rollout(max_response_tokens=4)
    stop = next(tuple(ids[1:3]) for ids in generate(free, prompt_ids).token_lists() if len(ids) == 4)
    engine = rollout(stop_ids=(stop,))
    engine.add(requests(prompt_ids))
    responses = engine.poll(0.0) + engine.poll(0.0)
    update(engine, qwen2(), 1)  # the same weights, so that rows do not change
    responses += finish(engine)
    mixed = [
        response
        for response in responses
        if tuple(response.token_ids[-2:]) == stop and response.versions[-2:] == [0, 1]
    ]
    assert mixed and not any(response.truncated for response in mixed)


def test_paused_requests_keep_their_order() -> None:
    engine, prompt_ids = rollout(max_num_seqs=16, max_response_tokens=12, stop_ids=()), prompts(60)
    engine.add(requests(prompt_ids))
    responses = engine.poll(0.0)
    for version in range(1, 4):
        update(engine, qwen2(), version)
        responses += engine.poll(0.0)
    # 16 slots: requests with tokens were added before all others.
    done = {int(response.request_id.removeprefix("generate-")) for response in responses}
    engine.abort([f"generate-{row}" for row in range(16 + len(done))])
    assert all(set(response.versions) == {3} for response in finish(engine))


def test_requests_wait_for_a_complete_update() -> None:
    engine, prompt_ids = rollout(), prompts(20)
    engine.add(requests(prompt_ids))
    responses = engine.poll(0.0)
    engine.begin_update(1)
    with pytest.raises(RolloutError, match="updating"):
        engine.poll()
    engine.abort_update()
    with pytest.raises(RolloutError, match="broken"):
        engine.poll()
    update(engine, qwen2(seed=1), 2)
    responses += finish(engine)
    assert {version for response in responses for version in response.versions} == {0, 2} and len(responses) == 20


def test_rejected_requests_leave_no_state() -> None:
    engine = rollout()
    with pytest.raises(RolloutError, match=r"prompt 1 .*130"):
        engine.add([Request("a", [5], 1), Request("b", [5] * 120, 1)])
    engine.add([Request("a", [5], 1)])
    for others in ([Request("c", [5], 1), Request("a", [6], 1)], [Request("c", [5], 1), Request("c", [6], 1)]):
        with pytest.raises(RolloutError, match=r"request [ac]\b"):
            engine.add(others)
    assert [response.request_id for response in finish(engine)] == ["a"]
    engine.add([Request("a", [5], 1)])
    assert engine.num_running == 1


def test_poll_without_requests_returns_immediately() -> None:
    engine, started = rollout(), time.monotonic()
    assert engine.poll(600.0) == [] and engine.num_running == 0
    assert time.monotonic() - started < 60


def test_poll_runs_until_a_response_finishes() -> None:
    engine = rollout()
    engine.add(requests(prompts(20)))
    assert engine.poll(600.0)


def test_partial_responses_grow_to_the_complete_ones() -> None:
    prompt_ids = prompts(6)
    expected = generated(rollout(), prompt_ids)
    engine, coming, longest = rollout(max_num_seqs=3), requests(prompt_ids), 0
    engine.add(coming)
    responses = []
    while engine.num_running:
        for request_id, (tokens, logprobs) in by_id(engine.read_partial([r.request_id for r in coming])).items():
            assert (tokens, logprobs) == tuple(values[: len(tokens)] for values in expected[request_id])
            longest = max(longest, len(tokens))
        responses += engine.poll(0.0)
    assert by_id(responses) == expected and longest > 3
    assert engine.read_partial([coming[0].request_id, "unknown"]) == []


def test_a_request_may_have_a_lower_limit_of_tokens() -> None:
    prompt_ids = prompts(6)
    expected = generated(rollout(), prompt_ids)
    engine = rollout()
    engine.add(replace(request, max_tokens=1 + i) for i, request in enumerate(requests(prompt_ids)))
    for response in finish(engine):
        limit = 1 + int(response.request_id.removeprefix("generate-"))
        tokens = expected[response.request_id][0]
        assert response.token_ids == tokens[:limit]
        assert response.truncated == (len(tokens) > limit or tokens[-1] != END)
