"""Episodes of several turns: the engine keeps the keys and values of earlier turns."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from flowrl.config import RolloutConfig
from flowrl.engines.rollout.base import Request, Response, Segment
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.hf.kv_cache import TurnCache, TurnCaches
from flowrl.engines.rollout.response_tensors import make_requests
from tests.engines.rollout.hf.test_engine import count_prefilled, prompts, rollout
from tests.engines.rollout.hf.test_stream import check_logprobs, update
from tests.engines.tables import VOCABULARY
from tests.engines.tiny import END, SIZES, llama, qwen2, to_float64
from tests.errors import rejects
from tests.slow_cases import as_parameters, one_of

LIMIT = 100
STOPS = ((3,), (4,), (5,), (6, 7))
"""With these stops, most turns are short."""

LENGTHS = (0, 1, 2, 16, 17, 40)
"""Numbers of tokens of observations. The pass of the next turn then has 0, 1, 2, 16, 17 or 40 new tokens."""

Episode = tuple[Segment, ...]
"""All segments of a complete response."""


def requests(num: int, *, greedy: bool = False, longest: int = 30, may_continue: bool = True) -> list[Request]:
    ids = torch.arange(num)
    temperature = 0.0 if greedy else None
    given = make_requests(prompts(num, longest), ids, ids % 3, seed=5, temperature=temperature)
    return [replace(request, may_continue=may_continue) for request in given]


def observation(request: Request) -> Segment:
    """Returns tokens that depend only on the episode and its turn."""
    chance = random.Random(f"{request.key} {len(request.segments)}")
    return Segment.environment([chance.randrange(8, VOCABULARY) for _ in range(chance.choice(LENGTHS))])


def next_request(request: Request, response: Response, turns: int = 5) -> Request | None:
    following = replace(request, segments=(*request.segments, Segment.policy(response), observation(request)))
    is_last = response.truncated or len(following.segments) // 2 == turns or following.num_response_tokens >= LIMIT
    return None if is_last else following


def play(
    engine: HfRollout, given: Sequence[Request], *, delay: Callable[[], int] = lambda: 0, together: int = 1000
) -> dict[str, Episode]:
    """Plays episodes in one stream and returns them by request id.

    Args:
        engine: generates the turns.
        given: first requests.
        delay: returns the number of polls for which the next turn of an episode waits.
        together: number of episodes that begin with each poll.
    """
    waiting = [(number // together, request) for number, request in enumerate(given)]
    current = {request.request_id: request for request in given}
    done: dict[str, Episode] = {}
    while waiting or engine.num_running:
        engine.add([request for polls, request in waiting if polls <= 0])
        waiting = [(polls - 1, request) for polls, request in waiting if polls > 0]
        for response in engine.poll(0.0):
            request = current[response.request_id]
            following = next_request(request, response)
            if following is None:
                engine.abort([request.request_id])
                done[request.request_id] = (*request.segments, Segment.policy(response))
            else:
                current[request.request_id] = following
                waiting.append((delay(), following))
    assert done.keys() == {request.request_id for request in given}
    return done


def engine_for(model: PreTrainedModel | None = None, **settings) -> HfRollout:
    model = qwen2(max_position_embeddings=256) if model is None else model
    return rollout(model, **{"max_response_tokens": LIMIT, "stop_ids": STOPS, **settings})


def gemma2() -> PreTrainedModel:
    """Returns a model whose attention has a softcap and whose first layer has a sliding window."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 256, "sliding_window": 24, "head_dim": 16, "hidden_size": 32}
    config = Gemma2Config(**sizes, attn_logit_softcapping=5.0, tie_word_embeddings=False)
    model = Gemma2ForCausalLM(config).double().eval()
    model.set_attn_implementation("eager")  # the only one of transformers with a softcap
    return model


def gpt2() -> PreTrainedModel:
    """Returns a model with a table of positions, which is only as long as the longest row."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=LIMIT + 30,
        eos_token_id=END,
        bos_token_id=0,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config).double().eval()


MODELS = {
    "qwen2": lambda: to_float64(qwen2(max_position_embeddings=256)),
    "one head of keys": lambda: to_float64(qwen2(max_position_embeddings=256, num_key_value_heads=1)),
    "sliding window": lambda: to_float64(
        qwen2(max_position_embeddings=256, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    ),
    "llama": lambda: to_float64(llama()),
    "gemma2": gemma2,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("greedy", one_of(True, False))
@pytest.mark.parametrize("name", as_parameters(MODELS, "qwen2", "sliding window"))
def test_continued_turns_equal_prefilled_turns_and_the_full_forward_pass(name: str, greedy: bool) -> None:
    model, given = MODELS[name](), requests(16, greedy=greedy, longest=28)
    engine, prefilling = engine_for(model), engine_for(model, keep_turn_cache=False)
    episodes, expected = play(engine, given), play(prefilling, given)
    for request in given:
        before = list(request.token_ids)
        for segment, other in zip(episodes[request.request_id], expected[request.request_id], strict=True):
            assert segment.token_ids == other.token_ids
            if segment.is_policy:
                assert segment.logprobs == pytest.approx(other.logprobs, rel=1e-5)
                check_logprobs(segment, before, [model])
            before += segment.token_ids
    assert len({len(segments) for segments in episodes.values()}) > 1


@pytest.fixture(scope="module")
def played() -> dict[str, Episode]:
    """Returns 30 episodes that were played together in float32."""
    return play(engine_for(), requests(30))


def test_episodes_are_bitwise_identical_alone_and_together(played: dict[str, Episode]) -> None:
    given, engine = requests(30), engine_for()
    for number in (0, 7, 11, 29):
        alone = play(engine, [given[number]])
        assert alone == {f"generate-{number}": played[f"generate-{number}"]}
    assert max(len(segments) for segments in played.values()) == 9, "5 turns"


@pytest.mark.parametrize("max_num_seqs", [1, 7, 16])
def test_episodes_are_bitwise_identical_whenever_their_turns_arrive(
    played: dict[str, Episode], max_num_seqs: int
) -> None:
    chance = random.Random(max_num_seqs)
    engine = engine_for(max_num_seqs=max_num_seqs)
    assert play(engine, requests(30), delay=lambda: chance.choice([0, 0, 3, 40]), together=4) == played


@pytest.mark.parametrize("num_heads", [1, 2])
def test_long_episodes_are_bitwise_identical_alone_and_together(num_heads: int) -> None:
    """Rows of different lengths attend to different numbers of positions and process observations in several passes."""
    model = qwen2(max_position_embeddings=2048, num_key_value_heads=num_heads)
    engine = rollout(model, max_response_tokens=1200, stop_ids=STOPS)
    chance = random.Random(0)
    observations = [
        [chance.randrange(8, VOCABULARY) for _ in range(length)] for length in (*range(20, 320, 20), 257, 600, 3)
    ]

    def two_turns(numbers: Sequence[int]) -> list[Response]:
        given = [requests(len(observations))[number] for number in numbers]
        batch, done = engine.open_batch(), dict[str, Response]()
        batch.add(given)
        following: list[Request] = []
        while batch.num_running:
            for response in batch.poll():
                number = int(response.request_id.removeprefix("generate-"))
                segments = (Segment.policy(response), Segment.environment(observations[number]))
                following.append(replace(given[numbers.index(number)], segments=segments))
        batch.add(following)
        while batch.num_running:
            done |= {response.request_id: response for response in batch.poll()}
        return [done[request.request_id] for request in given]

    together = two_turns(range(len(observations)))
    for number in (0, 8, 15, 16, 17):
        assert two_turns([number]) == [together[number]]


def test_a_turn_after_an_empty_observation_is_bitwise_identical_to_an_uninterrupted_response() -> None:
    given = requests(40)
    whole = engine_for(stop_ids=()).generate(given)
    batch, continued = engine_for(stop_ids=((3,),)).open_batch(), dict[str, Request]()
    batch.add(given)
    current, ended = {request.request_id: request for request in given}, dict[str, list[Segment]]()
    while batch.num_running:
        for response in batch.poll():
            request = current[response.request_id]
            segments = (*request.segments, Segment.policy(response))
            ended[request.request_id] = [segment for segment in segments if segment.is_policy]
            if not response.truncated and response.token_ids[-1] == 3 and sum(map(_size, segments)) < LIMIT:
                current[request.request_id] = replace(request, segments=(*segments, Segment.environment([])))
                batch.add([current[request.request_id]])
                continued[request.request_id] = request
    assert len(continued) > 10
    for response in whole:
        segments = ended[response.request_id]
        assert [token for segment in segments for token in segment.token_ids] == response.token_ids
        assert [value for segment in segments for value in segment.logprobs or ()] == response.logprobs


def _size(segment: Segment) -> int:
    return len(segment.token_ids)


def test_rows_that_prefill_do_not_copy_the_keys_of_a_continued_turn() -> None:
    """Both have the same tokens, but keys and values of decode steps differ in the last bit."""
    engine = engine_for()
    following = finish_turn(engine, requests(20))
    fresh = [replace(request, request_id=f"fresh {row}", may_continue=False) for row, request in enumerate(following)]
    expected = engine_for().generate(fresh)
    engine.add(following)
    early = {response.request_id for response in engine.poll(0.0)}
    rows = [row for row, request in enumerate(following) if request.request_id not in early]
    assert len(rows) > 5
    num_tokens = count_prefilled(engine)
    responses = finish_all(engine, [fresh[row] for row in rows])
    assert [responses[f"fresh {row}"] for row in rows] == [expected[row] for row in rows]
    assert sum(num_tokens) >= sum(len(fresh[row].context) - 1 for row in rows)


def finish_turn(engine: HfRollout, given: Sequence[Request]) -> list[Request]:
    """Plays the first turn of episodes. Returns the requests of those that continue, in order."""
    engine.add(given)
    responses: dict[str, Response] = {}
    while engine.num_running:
        responses |= {response.request_id: response for response in engine.poll()}
    pairs = [(request, next_request(request, responses[request.request_id])) for request in given]
    engine.abort([request.request_id for request, following in pairs if following is None])
    return [following for _, following in pairs if following is not None]


def finish_all(engine: HfRollout, given: Sequence[Request]) -> dict[str, Response]:
    engine.add(given)
    responses: dict[str, Response] = {}
    while engine.num_running:
        responses |= {response.request_id: response for response in engine.poll()}
    return responses


@pytest.mark.parametrize("waits_in_queue", [False, True])
def test_new_weights_between_two_turns_drop_the_caches(waits_in_queue: bool) -> None:
    given, engine, prefilling = requests(20), engine_for(), engine_for(keep_turn_cache=False)
    following = finish_turn(engine, given)
    assert following == finish_turn(prefilling, given) and engine.num_kept == len(following) > 10
    new = qwen2(seed=1, max_position_embeddings=256)
    if waits_in_queue:
        engine.add(following)
        update(engine, new, 1)
        responses = finish_all(engine, [])
    else:
        update(engine, new, 1)
        assert engine.num_kept == 0
        responses = finish_all(engine, following)
    update(prefilling, new, 1)
    assert responses == finish_all(prefilling, following), "bitwise"


def test_the_actors_new_weights_drop_the_caches() -> None:
    engine = engine_for()
    assert finish_turn(engine, requests(20)) and engine.num_kept
    engine.load_from(engine.model, 1)
    assert engine.num_kept == 0


def test_nothing_is_kept_after_all_episodes_have_ended() -> None:
    engine = engine_for()
    play(engine, requests(30))
    assert engine.num_kept == 0


def test_nothing_is_kept_of_requests_that_do_not_continue() -> None:
    engine = engine_for()
    engine.add(requests(20, may_continue=False))
    finish_all(engine, [])
    assert engine.num_kept == 0


def test_nothing_is_kept_of_truncated_turns() -> None:
    engine = engine_for(max_response_tokens=1)
    assert any(response.truncated for response in finish_all(engine, requests(20)).values())
    assert engine.num_kept == 0


def test_aborted_episodes_keep_nothing_and_do_not_affect_others(played: dict[str, Episode]) -> None:
    engine = engine_for()
    following = finish_turn(engine, requests(30))
    dropped, others = following[::3], [request for row, request in enumerate(following) if row % 3]
    engine.abort(["unknown", *(request.request_id for request in dropped)])
    assert engine.num_kept == len(others)
    for request_id, response in finish_all(engine, others).items():
        assert Segment.policy(response) == played[request_id][2]


def test_batches_keep_their_own_caches() -> None:
    engine, other = engine_for(), engine_for()
    following = finish_turn(engine, requests(20))
    expected = finish_all(other, finish_turn(other, requests(20)))
    engine.generate(requests(20))  # the same ids
    assert engine.num_kept == len(following)
    assert finish_all(engine, following) == expected


def test_a_restarted_episode_does_not_use_the_cache_of_its_first_attempt() -> None:
    given, engine = requests(20), engine_for()
    assert finish_turn(engine, given)
    changed = [replace(request, token_ids=[*request.token_ids[:-1], 9, 9]) for request in given]
    for again in (changed, given):
        fresh = finish_all(engine_for(), again)
        assert finish_all(engine, again) == fresh
    assert engine.num_kept == len([r for r in fresh.values() if not r.truncated])


def test_a_continued_turn_processes_new_tokens_only() -> None:
    engine = engine_for()
    following = finish_turn(engine, requests(20))
    num_tokens = count_prefilled(engine)
    finish_all(engine, following)
    num_new = [len(request.segments[-1].token_ids) for request in following]
    assert sum(num_tokens) == 16 * -(-max(num_new) // 16) * len([number for number in num_new if number])


def test_without_kept_caches_each_turn_prefills_all_tokens() -> None:
    engine = engine_for(keep_turn_cache=False)
    following = finish_turn(engine, requests(4))
    assert following and engine.num_kept == 0
    num_tokens = count_prefilled(engine)
    responses = finish_all(engine, following)
    fresh = finish_all(engine_for(), [replace(request, may_continue=False) for request in following])
    assert responses == fresh
    assert sum(num_tokens) >= sum(len(request.context) - 1 for request in following)


def test_only_engines_with_the_setting_accept_it() -> None:
    assert RolloutConfig(engine="vllm", max_response_tokens=4).keep_turn_cache
    with rejects("keep_turn_cache", "vllm", "hf", error=ValidationError):
        RolloutConfig(engine="vllm", max_response_tokens=4, keep_turn_cache=False)


def test_a_cache_is_taken_once_and_only_for_tokens_that_continue_it() -> None:
    states = [(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))]
    caches = TurnCaches()
    for request_id in ("a", "b", "c"):
        caches.keep(request_id, TurnCache((5, 6, 7), states))
    assert len(caches) == 3 and caches.num_bytes == 3 * 2 * 24 * 4
    taken = caches.take("a", (5, 6, 7, 8))
    assert taken is not None and taken.tokens == (5, 6, 7)
    assert caches.take("a", (5, 6, 7, 8)) is None
    assert caches.take("b", (5, 6, 8, 8)) is None and caches.take("b", (5, 6, 7, 8)) is None
    caches.release(["c", "unknown"])
    assert len(caches) == 0 and caches.num_bytes == 0
