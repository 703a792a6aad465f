"""Responses of several segments: an engine continues after the prompt and all earlier segments."""

import random
from dataclasses import replace

import pytest
import torch

from flowrl.engines.rollout.base import Request, Response, RolloutError, Segment
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.rollout.sampling import sample_tokens, uniforms
from tests.engines.closeness import FLOAT32_RTOL, relative_error
from tests.engines.losses import policy_logits
from tests.engines.rollout.hf.test_engine import count_prefilled, prompts, rollout
from tests.engines.rollout.hf.test_stream import check_logprobs, finish, update
from tests.engines.tiny import END, qwen2, to_float64
from tests.errors import rejects

CUTS = (1, 2, 5, 9)
ENVIRONMENT = Segment.environment([7, 3, 9])


def requests(num: int, seed: int = 0) -> list[Request]:
    ids = torch.arange(num)
    return make_requests(prompts(num, seed=seed), ids, ids % 3, seed=5)


def part(response: Response, end: int) -> Segment:
    """Returns the first tokens of a response as a segment."""
    return Segment(response.token_ids[:end], response.logprobs[:end], response.versions[:end])


def split(whole: list[Response], given: list[Request]) -> list[tuple[Request, Response, int]]:
    """Returns (request that continues after a boundary, response, boundary), with boundaries of different lengths."""
    rows = zip(given, whole, (CUTS[row % len(CUTS)] for row in range(len(given))), strict=True)
    return [
        (replace(request, segments=(part(response, cut), Segment.environment([]))), response, cut)
        for request, response, cut in rows
        if len(response.token_ids) > cut
    ]


@pytest.mark.parametrize("max_num_seqs", [7, 64])
def test_a_response_equals_the_same_response_split_at_a_boundary(max_num_seqs: int) -> None:
    given = requests(60)
    engine = rollout(to_float64(qwen2()), max_response_tokens=16, max_num_seqs=max_num_seqs)
    continued = split(engine.generate(given), given)
    assert len(continued) > 30
    rests = engine.generate([request for request, _, _ in continued])
    engine.add([request for request, _, _ in continued])
    streamed = {response.request_id: response for response in finish(engine)}
    for (request, response, cut), rest in zip(continued, rests, strict=True):
        assert rest == streamed[request.request_id]
        assert rest.token_ids == response.token_ids[cut:] and rest.truncated == response.truncated
        assert rest.logprobs == response.logprobs[cut:], "bitwise"


def test_a_split_response_has_the_same_tokens_in_float32() -> None:
    """Keys and values of a prefill and of decode steps differ by rounding, as after a weight update."""
    given, engine = requests(60), rollout(max_response_tokens=16)
    continued = split(engine.generate(given), given)
    rests = engine.generate([request for request, _, _ in continued])
    assert [rest.token_ids for rest in rests] == [response.token_ids[cut:] for _, response, cut in continued]
    actual = torch.tensor([logprob for rest in rests for logprob in rest.logprobs])
    expected = torch.tensor([logprob for _, response, cut in continued for logprob in response.logprobs[cut:]])
    assert relative_error(actual, expected) < FLOAT32_RTOL


def test_a_segment_follows_the_prompt_and_all_earlier_segments() -> None:
    model, limit = to_float64(qwen2()), 24
    engine, given = rollout(model, max_response_tokens=limit), requests(30)
    whole = zip(given, engine.generate(given), strict=True)
    first = [replace(request, segments=(part(r, 4), ENVIRONMENT)) for request, r in whole]
    second = [
        replace(request, segments=(*request.segments, Segment.policy(r), ENVIRONMENT))
        for request, r in zip(first, engine.generate(first), strict=True)
        if not r.truncated and request.num_response_tokens + len(r.token_ids) + 3 < limit
    ]
    assert len(second) > 3
    for request, response in zip(second, engine.generate(second), strict=True):
        row = list(request.context)
        for token, logprob in zip(response.token_ids, response.logprobs, strict=True):
            with torch.no_grad():
                logits = policy_logits(model, torch.tensor([row]))[:, -1]
            numbers = uniforms(torch.tensor([request.key]), torch.tensor([len(row)]))
            expected, expected_logprob = sample_tokens(logits, numbers)
            assert token == int(expected) and logprob == pytest.approx(float(expected_logprob), rel=1e-6)
            row.append(token)
        assert response.truncated == (row[-1] != END)
        assert len(row) - len(request.token_ids) == limit if response.truncated else row[-1] == END


def test_segments_without_room_for_another_token_are_rejected() -> None:
    engine, (request,) = rollout(max_response_tokens=3), requests(1)
    full = replace(request, segments=(ENVIRONMENT,))
    for method in (engine.generate, engine.add):
        with rejects("generate-0", "max_response_tokens", "3", error=RolloutError):
            method([full])
    assert engine.num_running == 0


def test_a_stop_sequence_does_not_continue_across_segments() -> None:
    """The slot was used before by a row with other tokens."""
    (request,) = requests(1)
    (first, second, *_) = rollout(stop_ids=(), max_response_tokens=8).generate([request])[0].token_ids
    engine = rollout(stop_ids=((first, second),), max_response_tokens=8)
    whole = engine.generate([request])[0]
    assert whole.token_ids == [first, second] and not whole.truncated
    for earlier in (Segment([first], [0.0], [0]), Segment.environment([first])):
        (rest,) = engine.generate([replace(request, segments=(earlier,))])
        assert rest.token_ids[0] == second and len(rest.token_ids) > 1
    engine.add([request, replace(request, request_id="other", segments=(Segment.environment([first]),))])
    assert {r.request_id: len(r.token_ids) for r in finish(engine)}["other"] > 1


def test_rows_with_the_same_segments_share_a_prefill() -> None:
    engine, given = rollout(), requests(1)
    counts = count_prefilled(engine)
    same = replace(given[0], token_ids=[5] * 10, segments=(Segment.environment([6] * 8),))
    engine.generate([replace(same, request_id=f"row-{row}", key=row) for row in range(8)])
    assert counts == [32], "17 tokens and padding"


def test_a_continued_response_gets_new_weights_between_its_tokens() -> None:
    """Each token has the version and the log-probability of the model that sampled it."""
    models = [to_float64(qwen2(seed=seed)) for seed in range(4)]
    engine = rollout(to_float64(qwen2()), max_response_tokens=30, max_num_seqs=20)
    given = {request.request_id: request for request in requests(40)}
    chance, done = random.Random(0), dict[str, Response]()
    engine.add(given.values())
    for version, model in enumerate(models):
        if version:
            update(engine, model, version)
        while engine.num_running and (version == 3 or chance.random() < 0.8):
            for response in engine.poll(0.0):
                request = given[response.request_id]
                segments = (*request.segments, Segment.policy(response), ENVIRONMENT)
                following = replace(request, segments=segments)
                if response.truncated or following.num_response_tokens >= 30 or len(segments) > 4:
                    done[request.request_id] = response
                else:
                    given[request.request_id] = following
                    engine.add([following])
    assert done.keys() == given.keys()
    mixed = 0
    for name, response in done.items():
        segments = (*given[name].segments, Segment.policy(response))
        row = list(given[name].token_ids)
        for segment in segments:
            if segment.versions is not None and segment.logprobs is not None:
                mixed += len(segments) > 1 and len(set(segment.versions)) > 1
                check_logprobs(segment, row, models)
            row += segment.token_ids
    assert mixed and any(len(request.segments) == 4 for request in given.values())


def test_aborted_continued_responses_return_nothing() -> None:
    engine: HfRollout = rollout()
    given = [replace(request, segments=(ENVIRONMENT,)) for request in requests(20)]
    expected = {r.request_id: r for r in engine.generate(given)}
    engine.add(given)
    early = engine.poll(0.0)
    dropped = {f"generate-{row}" for row in range(0, 20, 3)} - {r.request_id for r in early}
    engine.abort(dropped)
    assert {r.request_id: r for r in [*early, *finish(engine)]} == {
        name: response for name, response in expected.items() if name not in dropped
    }
