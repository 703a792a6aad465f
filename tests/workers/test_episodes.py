"""Episodes: the segments of each response of an environment, and their scores, in batches and in streams."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.controller.errors import WorkerUserError
from flowrl.data.chat import ChatTokenizer
from flowrl.data.template import ConversationTemplate
from flowrl.engines.models.weights import meta_copy
from flowrl.engines.rollout.base import Request, Response, RolloutEngine
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.environments.environment_function import EnvironmentFunctionError
from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.row_scorer import RewardCall, RowScores
from flowrl.user_code.channel import RequestClient, RequestError, RequestServer
from flowrl.workers import Rollout
from flowrl.workers.episodes import (
    Environment,
    Episode,
    Episodes,
    continue_episodes,
    run_episodes,
    score_columns,
)
from tests.data.test_chat import make_larger
from tests.engines.rollout.hf.test_engine import prompts, rollout
from tests.engines.tiny import qwen2, tokenizer
from tests.errors import rejects
from tests.workers.test_streaming import by_row

LIMIT, SAMPLES, NUM_PROMPTS = 24, 2, 12
ENVIRONMENTS = "tests.environments.environment_functions"
OpenGroup = Callable[..., WorkerGroup]


@pytest.fixture
def open_group(model: ModelConfig) -> Iterator[OpenGroup]:
    placement = Placement(pools={"b": [1]}, roles={"rollout": "b"})
    with ExitStack() as clusters:

        def open_one(function: str | None, **settings: Any) -> WorkerGroup:
            name = None if function is None else f"{ENVIRONMENTS}:{function}"
            given = {"max_response_tokens": LIMIT, "max_num_seqs": 16, "environment": name} | settings
            cluster = clusters.enter_context(Cluster(placement, backend="inline", num_threads=1))
            return cluster.group("rollout", Rollout, RolloutConfig.model_validate(given), model, seed=0)

        yield open_one


def batch() -> Batch:
    rows = [(prompt_id, sample) for prompt_id in range(NUM_PROMPTS) for sample in range(SAMPLES)]
    columns = [
        {"prompt_ids": [2, 3, 5 + i % 9, 4, 14], "prompt_id": i, "sample": s, "answer": str(i), "hint": "-"}
        for i, s in rows
    ]
    return Batch.from_rows(columns)


def split(responses: Batch, name: str) -> list[list[Any]]:
    return [row.tolist() for row in responses.get(name).split(responses.lengths().tolist())]


def test_a_response_ends_at_the_end_of_turn_of_the_template(
    open_group: OpenGroup, model: ModelConfig, tmp_path: Path
) -> None:
    responses = [ids[5:] for ids in split(open_group(None).generate(batch()), "input_ids")]
    end = next(ids[1] for ids in responses if len(ids) > 6 and ids[1] > 2)
    path = tmp_path / "template.json"

    for stop in ({"stop_ids": [end]}, {"end_of_assistant": ChatTokenizer(model.tokenizer_path).decode([end])}):
        path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}", **stop}))
        stopped = open_group(None, template=path).generate(batch())
        for full, ids in zip(responses, split(stopped, "input_ids"), strict=True):
            assert ids[5:] == full[: full.index(end) + 1 if end in full else None]


def test_the_text_of_a_response_ends_before_the_stop_string_of_the_template(
    open_group: OpenGroup, model: ModelConfig, tmp_path: Path
) -> None:
    """Stop tokens of `rollout.stop_ids` stay in the text."""
    text, path = ChatTokenizer(model.tokenizer_path), tmp_path / "template.json"
    full = [ids[5:] for ids in split(open_group(None).generate(batch()), "input_ids")]
    end = next(ids[1] for ids in full if len(ids) > 6 and ids[1] > 2)
    path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}", "stop_strings": [text.decode([end])]}))
    stopped = open_group(None, template=path).generate(batch())
    ids = [row[5:] for row in split(stopped, "input_ids")]
    assert any(row[-1] == end for row in ids) and not all(row[-1] == end for row in ids)
    assert stopped.get("response") == [text.decode(row[:-1] if row[-1] == end else row) for row in ids]
    kept = open_group(None, stop_ids=[[end]]).generate(batch())
    assert kept.get("response") == [text.decode(row[5:]) for row in split(kept, "input_ids")]


def segments(mask: list[bool]) -> list[int]:
    """Returns the number of tokens of each segment after the prompt, which has five tokens."""
    sizes, previous = [0], True
    for is_policy in mask[5:]:
        if is_policy != previous:
            sizes.append(0)
        sizes[-1] += 1
        previous = is_policy
    return sizes


def test_a_response_has_the_tokens_of_both_producers(open_group: OpenGroup, model: ModelConfig) -> None:
    """Sampled tokens are not tokenized again, and the policy's columns are empty at the environment's tokens."""
    responses, text = open_group("needs_hint", max_response_tokens=50).generate(batch()), ChatTokenizer(model.path)
    masks, ids = split(responses, "response_mask"), split(responses, "input_ids")
    for row, mask in enumerate(masks):
        turns = segments(mask)
        assert mask[-1] and turns[1::2] == [1] * (len(turns) // 2)
        assert not any(mask[:5]) and all(ids[row][i] == text.encode("-")[0] for i in range(5, len(mask)) if not mask[i])
    assert max(len(segments(mask)) for mask in masks) > 3
    mask_T = responses.get("response_mask")
    assert (
        not responses.get("rollout_logprobs")[~mask_T].any() and (responses.get("rollout_logprobs")[mask_T] < 0).all()
    )
    assert (responses.get("weight_version") == torch.where(mask_T, 0, -1)).all()
    assert responses.get("response") == [text.decode(row[5:]) for row in ids]
    for row, parts in enumerate(responses.get("segments")):
        assert [part["end"] - part["start"] for part in parts] == segments(masks[row])
        assert "".join(part["text"] for part in parts) == text.decode_all(ids[row][5:])


def test_streamed_responses_equal_those_of_generate(open_group: OpenGroup) -> None:
    group = open_group("count_down", max_num_seqs=7)
    given = batch()
    expected = by_row([given.union(group.generate(given))])
    group.add(given, SAMPLES)
    batches: list[Batch] = []
    while sum(piece.num_rows for piece in batches) < len(given):
        batches.append(group.poll(0.02))
    assert by_row(batches) == expected
    assert len({len(segments(list(row[1]))) for row in expected.values()}) > 2


def test_an_aborted_group_stops_between_its_segments(open_group: OpenGroup) -> None:
    group = open_group("count_down")
    group.add(batch(), SAMPLES)
    first = set(group.poll(0.0).get("prompt_id").tolist())
    dropped = set(range(0, NUM_PROMPTS, 3)) - first
    group.abort(sorted(dropped))
    done = list(first)
    while len(done) < NUM_PROMPTS - len(dropped):
        done += sorted(set(group.poll(0.05).get("prompt_id").tolist()))
    assert sorted(done) == [i for i in range(NUM_PROMPTS) if i not in dropped]
    assert group.poll(1.0).num_rows == 0


def test_an_environment_that_ends_at_once_changes_nothing(open_group: OpenGroup) -> None:
    given = batch()
    plain, ended = (open_group(name).generate(given) for name in (None, "end_at_once"))
    for name in plain.columns:
        column, own = plain.get(name), ended.get(name)
        assert torch.equal(column, own) if isinstance(column, torch.Tensor) else column == own


def test_output_that_does_not_fit_ends_a_response_before_it(open_group: OpenGroup) -> None:
    plain, long = (open_group(name).generate(batch()) for name in (None, "long_output"))
    assert split(long, "input_ids") == split(plain, "input_ids") and long.get("response_mask")[-1]
    assert all(long.get("truncated")) and not all(plain.get("truncated"))


def test_the_limit_counts_the_tokens_of_both_producers(open_group: OpenGroup) -> None:
    responses = open_group("ask_again", max_response_tokens=9).generate(batch())
    sizes = [segments(mask) for mask in split(responses, "response_mask")]
    assert max(map(sum, sizes)) == 9 and any(len(turns) == 3 and sum(turns) == 9 for turns in sizes)
    ends = zip(sizes, responses.get("truncated").tolist(), split(responses, "input_ids"), strict=True)
    for turns, truncated, ids in ends:
        assert truncated == (ids[-1] != 1 or len(turns) == 1), "id 1 is the end token; one turn: the output did not fit"


@pytest.mark.parametrize("method", ["generate", "poll"])
def test_an_error_of_the_function_names_function_and_cause(open_group: OpenGroup, method: str) -> None:
    group = open_group("failing")
    with rejects(ENVIRONMENTS, "failing", "KeyError", "None", error=WorkerUserError):
        if method == "generate":
            group.generate(batch()).get("response")
        group.add(batch(), SAMPLES)
        group.poll(600.0).get("response")


def run_all(
    engine: RolloutEngine, requests: Sequence[Request], environment: Environment | None, text: ChatTokenizer
) -> list[tuple[Request, Response | None]]:
    """Returns the last request and the last segment of each episode."""
    episodes = [Episode(0, request, {}) for request in requests]
    run_episodes(engine, episodes, Episodes(text, environment))
    return [(episode.request, episode.response) for episode in episodes]


def test_all_segments_use_weights_that_are_gathered_once(model: ModelConfig) -> None:
    """Ranks of a sharded actor gather weights together, but need different numbers of segments."""
    source, given = qwen2(), prompts(20)
    ids, text = torch.arange(20), ChatTokenizer(model.path)
    environment = Environment(f"{ENVIRONMENTS}:count_down", text, 40)
    engine = HfRollout(meta_copy(source), tokenizer(), RolloutConfig(max_response_tokens=40), gathered_from=source)
    requests = make_requests(given, ids, ids, seed=0)
    expected = run_all(rollout(source, max_response_tokens=40), requests, environment, text)
    assert run_all(engine, requests, environment, text) == expected
    assert max(len(request.segments) for request, _ in expected) > 3
    assert run_all(engine, [], environment, text) == []
    assert all(parameter.is_meta for parameter in engine.model.parameters())
    with engine.gathered_weights():
        before = [id(parameter) for parameter in engine.model.parameters()]
        run_all(engine, requests[:2], environment, text)
        assert [id(parameter) for parameter in engine.model.parameters()] == before


@pytest.mark.parametrize("value", ["a<i>", [5, 9]])
def test_a_returned_token_without_an_embedding_is_an_error_of_the_function(tmp_path: Path, value: object) -> None:
    environment = Environment(f"{ENVIRONMENTS}:given", make_larger(tmp_path), 40)
    request, response = Request("0", [4], key=0), Response("0", [5], [0.0], [0])
    with rejects(ENVIRONMENTS, "given", 9, 8, error=EnvironmentFunctionError):
        environment.next_request(request, response, {"value": value})


def test_kept_caches_are_released_with_their_episodes(model: ModelConfig) -> None:
    engine, ids, text = rollout(qwen2(), max_response_tokens=40), torch.arange(20), ChatTokenizer(model.path)
    episodes = Episodes(text, Environment(f"{ENVIRONMENTS}:count_down", text, 40))
    requests = make_requests(prompts(20), ids, ids, seed=0, may_continue=True)
    batch, num_kept = engine.open_batch(), []
    batch.add(episodes.add([Episode(0, request, {}) for request in requests]))
    while batch.num_running:
        responses = batch.poll()
        num_kept.append(batch.num_kept)
        continue_episodes(batch, episodes, responses, 0)
    assert max(num_kept) > 0 and batch.num_kept == 0


# Scores.

KEY = b"k" * 32


def as_scores(value: float) -> RowScores:
    return RowScores({"scores": value}, {"reward": RewardCall(value)})


@pytest.fixture
def reward() -> Iterator[tuple[RequestClient, list[tuple[dict[str, Any], Future[RowScores]]]]]:
    """Yields a client of a reward whose scores the test sets, and the rows that it has received."""
    received: list[tuple[dict[str, Any], Future[RowScores]]] = []

    def handle(row: dict[str, Any], connection: object) -> Future[RowScores]:
        received.append((row, Future()))
        return received[-1][1]

    with (
        closing(RequestServer("127.0.0.1", 0, KEY, handle)) as server,
        closing(RequestClient([server.address], KEY)) as client,
    ):
        yield client, received


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_a_complete_response_is_scored_with_its_columns(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    text = ChatTokenizer(model.path)
    episodes = Episodes(text, Environment(f"{ENVIRONMENTS}:ask_again", text, 20), client)
    request = Request("0-0", [2, 3], 0)
    episode = Episode(0, request, {"prompt": "1+1", "answer": "2"})
    episodes.add([episode])
    (following,) = episodes.add_responses([Response("0-0", [4, 5], [0.0] * 2, [0] * 2)])
    assert episodes.num_waiting == 0 and episodes.is_unfinished("0-0")
    assert episodes.add_responses([Response("0-0", [6], [0.0], [0], truncated=True)]) == []
    assert episodes.num_waiting == 1 and episodes.is_unfinished("0-0") and episode.scores is None
    wait_until(lambda: bool(received))
    row, future = received[0]
    ids = [4, 5, *text.encode("="), 6]
    assert [token for segment in following.segments for token in segment.token_ids] == ids[:-1]
    assert row == {
        "prompt": "1+1",
        "answer": "2",
        "response": text.decode(ids),
        "tagged_response": text.decode(ids),
        "token_ids": ids,
        "finish_reason": "length",
    }
    episodes.receive(0)
    assert episode.scores is None
    future.set_result(as_scores(0.5))
    episodes.receive(None)
    assert episode.scores == as_scores(0.5) and episodes.num_waiting == 0 and not episodes.is_unfinished("0-0")


def test_rewards_and_environments_get_the_text_before_the_stop_string(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    letter, end = (ChatTokenizer(model.path).encode(text)[0] for text in "73")
    template = ConversationTemplate(chat_template="{{ messages[0].content }}", stop_strings=("3",))
    text = ChatTokenizer(model.path, template)
    episodes = Episodes(text, Environment(f"{ENVIRONMENTS}:repeat", text, 20), client)
    episodes.add([Episode(0, Request("0-0", [2], 0), {})])
    (following,) = episodes.add_responses([Response("0-0", [letter, end], [0.0] * 2, [0] * 2)])
    assert text.decode(following.segments[1].token_ids) == "7"
    assert episodes.add_responses([Response("0-0", [letter, end], [0.0] * 2, [0] * 2)]) == []
    wait_until(lambda: bool(received))
    # The stop string within the response stays, because the environment's text follows it.
    assert received[0][0]["response"] == "7377"
    assert received[0][0]["token_ids"] == [letter, end, letter, letter, end]


def test_a_dropped_episode_gets_no_score(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    episodes = Episodes(ChatTokenizer(model.path), None, client)
    both = [Episode(i, Request(f"0-{i}", [2], 0), {}) for i in range(2)]
    episodes.add(both)
    episodes.add_responses(Response(f"0-{i}", [4], [0.0], [0]) for i in range(2))
    wait_until(lambda: len(received) == 2)
    episodes.drop(["0-0", "9-9"])
    for _, future in received:
        future.set_result(as_scores(1.0))
    episodes.receive(None)
    assert [episode.scores for episode in both] == [None, as_scores(1.0)]
    assert episodes.num_waiting == 0


def test_a_reward_that_fails_ends_generation(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    episodes = Episodes(ChatTokenizer(model.path), None, client)
    episodes.add([Episode(0, Request("0-0", [2], 0), {})])
    episodes.add_responses([Response("0-0", [4], [0.0], [0])])
    wait_until(lambda: bool(received))
    received[0][1].set_exception(RewardError("no number for this row"))
    with pytest.raises(RequestError, match="no number for this row"):
        episodes.receive(None)


def test_all_responses_of_a_call_are_scored(model: ModelConfig) -> None:
    rows: list[dict[str, Any]] = []

    def handle(row: dict[str, Any], connection: object) -> Future[RowScores]:
        rows.append(row)
        future: Future[RowScores] = Future()
        future.set_result(as_scores(float(len(row["token_ids"]))))
        return future

    text, source = ChatTokenizer(model.path), qwen2()
    ids = torch.arange(20)
    requests = make_requests(prompts(20), ids, ids, seed=0)
    own = [Episode(0, request, {}) for request in requests]
    with (
        closing(RequestServer("127.0.0.1", 0, KEY, handle)) as server,
        closing(RequestClient([server.address], KEY)) as client,
    ):
        run_episodes(rollout(source, max_response_tokens=40), own, Episodes(text, None, client))
    assert len(rows) == 20
    for episode in own:
        assert episode.response is not None and episode.scores is not None
        assert episode.scores.values == {"scores": float(len(episode.response.token_ids))}


def test_columns_of_scores() -> None:
    calls = {"exact": RewardCall(1.0, 0.5), "style": RewardCall(None, 2.0, "timeout", "late")}
    rows = [RowScores({"scores": 1.0, "exact": 1.0}, calls), RowScores({"scores": 2.0, "exact": math.nan}, {})]
    columns = score_columns(rows, ("scores", "exact"))
    assert columns["scores"].tolist() == [1.0, 2.0] and columns["exact"].isnan().tolist() == [False, True]
    assert columns["reward_failed"].tolist() == [True, False]
    assert columns["reward_calls"] == [
        {
            "exact": {"score": 1.0, "seconds": 0.5, "failure": None, "message": ""},
            "style": {"score": None, "seconds": 2.0, "failure": "timeout", "message": "late"},
        },
        {},
    ]
    assert score_columns([None, None], ()) == {}
