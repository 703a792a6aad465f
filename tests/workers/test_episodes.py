"""Episodes: the turns of each response with an environment, and their scores, in batches and in streams."""

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
from flowrl.data.chat import ChatTokenizer
from flowrl.data.template import ConversationTemplate
from flowrl.engines.models.weights import meta_copy
from flowrl.engines.rollout.base import Request, Response, RolloutEngine
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.environments.base import Observation
from flowrl.environments.requests import Close, Reply, Reset
from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.row_scorer import RewardCall, RowScores
from flowrl.user_code.channel import RequestClient, RequestError, RequestServer
from flowrl.workers import Rollout
from flowrl.workers.dialogs import EPISODE, LOST, TURN_REWARDS, Dialogs, EnvironmentServers
from flowrl.workers.episodes import (
    Episode,
    Episodes,
    continue_episodes,
    run_episodes,
    score_columns,
)
from tests.engines.rollout.hf.test_engine import prompts, rollout
from tests.engines.tiny import qwen2, tokenizer
from tests.workers.test_streaming import by_row

LIMIT, SAMPLES, NUM_PROMPTS = 24, 2, 12
SCORE = ("scores", TURN_REWARDS, EPISODE)
KEY = b"k" * 32
OpenGroup = Callable[..., WorkerGroup]


def respond(request: Any, connection: object) -> Future[Reply]:
    """An environment that asks `num_turns` of the row times, after the first response."""
    reply = Reply()
    if isinstance(request, Reset):
        NUM_TURNS[request.episode] = request.row["num_turns"]
        reply = Reply(Observation([{"role": "user", "content": "1+2="}]))
    elif not isinstance(request, Close):
        is_last = request.response.turn >= NUM_TURNS[request.episode]
        again = [{"role": "user", "content": "3"}]
        reply = Reply(Observation(reward=1.0, done=True) if is_last else Observation(again, reward=0.0))
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future


NUM_TURNS: dict[Any, int] = {}
"""Episode -> further turns. An episode has the id of its run, so tests do not share entries."""


@pytest.fixture
def turns() -> Iterator[RequestServer]:
    with closing(RequestServer("127.0.0.1", 0, KEY, respond)) as server:
        yield server


@pytest.fixture
def open_group(model: ModelConfig, turns: RequestServer) -> Iterator[OpenGroup]:
    """Returns a function that opens a rollout, by default with the environment `turns`."""
    placement = Placement(pools={"b": [1]}, roles={"rollout": "b"})
    with ExitStack() as clusters:

        def open_one(*, has_turns: bool = True, **settings: Any) -> WorkerGroup:
            given = {"max_response_tokens": LIMIT, "max_num_seqs": 16} | settings
            cluster = clusters.enter_context(Cluster(placement, backend="inline", num_threads=1))
            group = cluster.group("rollout", Rollout, RolloutConfig.model_validate(given), model, seed=0)
            if has_turns:
                group.connect_environment(EnvironmentServers([turns.address], KEY, 64, 0, True))
            return group

        yield open_one


@pytest.fixture
def open_dialogs(model: ModelConfig, turns: RequestServer) -> Iterator[Callable[[], Episodes]]:
    with ExitStack() as opened:

        def open_one() -> Episodes:
            client = opened.enter_context(closing(RequestClient([turns.address], KEY, lost_result=LOST)))
            text, limits = ChatTokenizer(model.path), {"max_response_tokens": 40, "max_prompt_tokens": 64}
            dialogs = Dialogs(text, client, **limits, restarts=0, stops_on_failure=True)
            return Episodes(text, dialogs=dialogs)

        yield open_one


def batch() -> Batch:
    rows = [(prompt_id, sample) for prompt_id in range(NUM_PROMPTS) for sample in range(SAMPLES)]
    columns = [
        {"prompt_ids": [2, 3, 5 + i % 9, 4, 14], "prompt_id": i, "sample": s, "num_turns": i % 4} for i, s in rows
    ]
    return Batch.from_rows(columns)


def split(responses: Batch, name: str) -> list[list[Any]]:
    return [row.tolist() for row in responses.get(name).split(responses.lengths().tolist())]


def test_a_response_ends_at_the_end_of_turn_of_the_template(
    open_group: OpenGroup, model: ModelConfig, tmp_path: Path
) -> None:
    responses = [ids[5:] for ids in split(open_group(has_turns=False).generate(batch()), "input_ids")]
    end = next(ids[1] for ids in responses if len(ids) > 6 and ids[1] > 2)
    path = tmp_path / "template.json"

    for stop in ({"stop_ids": [end]}, {"end_of_assistant": ChatTokenizer(model.tokenizer_path).decode([end])}):
        path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}", **stop}))
        stopped = open_group(has_turns=False, template=path).generate(batch())
        for full, ids in zip(responses, split(stopped, "input_ids"), strict=True):
            assert ids[5:] == full[: full.index(end) + 1 if end in full else None]


def test_the_text_of_a_response_ends_before_the_stop_string_of_the_template(
    open_group: OpenGroup, model: ModelConfig, tmp_path: Path
) -> None:
    """Stop tokens of `rollout.stop_ids` stay in the text."""
    text, path = ChatTokenizer(model.tokenizer_path), tmp_path / "template.json"
    full = [ids[5:] for ids in split(open_group(has_turns=False).generate(batch()), "input_ids")]
    end = next(ids[1] for ids in full if len(ids) > 6 and ids[1] > 2)
    path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}", "stop_strings": [text.decode([end])]}))
    stopped = open_group(has_turns=False, template=path).generate(batch())
    ids = [row[5:] for row in split(stopped, "input_ids")]
    assert any(row[-1] == end for row in ids) and not all(row[-1] == end for row in ids)
    assert stopped.get("response") == [text.decode(row[:-1] if row[-1] == end else row) for row in ids]
    kept = open_group(has_turns=False, stop_ids=[[end]]).generate(batch())
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
    responses = open_group(max_response_tokens=50).generate(batch(), score=SCORE)
    text = ChatTokenizer(model.path)
    masks, ids = split(responses, "response_mask"), split(responses, "input_ids")
    described = responses.get("segments")
    mask_T = responses.get("response_mask")
    assert not responses.get("rollout_logprobs")[~mask_T].any()
    assert (responses.get("rollout_logprobs")[mask_T] < 0).all()
    assert (responses.get("weight_version") == torch.where(mask_T, 0, -1)).all()
    assert max(len(parts) for parts in described) > 3
    for row, parts in enumerate(described):
        start = masks[row].index(True)
        kinds = [part["kind"] for part in parts]
        assert kinds == ["policy", "environment"] * (len(parts) // 2) + ["policy"]
        expected = [part["kind"] == "policy" for part in parts for _ in range(part["start"], part["end"])]
        assert masks[row][start:] == expected
        assert "".join(part["text"] for part in parts) == text.decode_all(ids[row][start:])
        assert all("3" in part["text"] for part in parts if part["kind"] == "environment")


def test_streamed_responses_equal_those_of_generate(open_group: OpenGroup) -> None:
    group = open_group(max_num_seqs=7)
    given = batch()
    expected = by_row([given.union(group.generate(given, score=SCORE))])
    group.add(given, SAMPLES, score=SCORE)
    batches: list[Batch] = []
    while sum(piece.num_rows for piece in batches) < len(given):
        batches.append(group.poll(0.02, score=SCORE))
    assert by_row(batches) == expected
    assert len({sum(row[1]) for row in expected.values()}) > 2


def test_an_aborted_group_stops_between_its_turns(open_group: OpenGroup) -> None:
    group = open_group()
    group.add(batch(), SAMPLES, score=SCORE)
    first = set(group.poll(0.0, score=SCORE).get("prompt_id").tolist())
    dropped = set(range(0, NUM_PROMPTS, 3)) - first
    group.abort(sorted(dropped))
    done = list(first)
    while len(done) < NUM_PROMPTS - len(dropped):
        done += sorted(set(group.poll(0.05, score=SCORE).get("prompt_id").tolist()))
    assert sorted(done) == [i for i in range(NUM_PROMPTS) if i not in dropped]
    assert group.poll(1.0, score=SCORE).num_rows == 0


def test_the_limit_counts_the_tokens_of_both_producers(open_group: OpenGroup) -> None:
    responses = open_group(max_response_tokens=12).generate(batch(), score=SCORE)
    sizes = [mask[mask.index(True) :] for mask in split(responses, "response_mask")]
    assert all(len(mask) <= 12 and mask[-1] for mask in sizes)
    assert any(not all(mask) for mask in sizes) and any(responses.get("truncated"))


def run_all(engine: RolloutEngine, episodes: Sequence[Episode], own: Episodes) -> list[tuple[Request, Response | None]]:
    """Returns the last request and the last segment of each episode."""
    run_episodes(engine, episodes, own)
    return [(episode.request, episode.response) for episode in episodes]


def make_episodes(num: int) -> list[Episode]:
    ids = torch.arange(num)
    requests = make_requests(prompts(num), ids, ids, seed=0, may_continue=True)
    return [Episode(0, request, {"num_turns": i % 4}) for i, request in enumerate(requests)]


def test_all_turns_use_weights_that_are_gathered_once(model: ModelConfig, open_dialogs: Callable[[], Episodes]) -> None:
    """Ranks of a sharded actor gather weights together, but need different numbers of turns."""
    source = qwen2()
    engine = HfRollout(meta_copy(source), tokenizer(), RolloutConfig(max_response_tokens=40), gathered_from=source)
    expected = run_all(rollout(source, max_response_tokens=40), make_episodes(20), open_dialogs())
    assert run_all(engine, make_episodes(20), open_dialogs()) == expected
    assert max(len(request.segments) for request, _ in expected) > 3
    assert run_all(engine, [], open_dialogs()) == []
    assert all(parameter.is_meta for parameter in engine.model.parameters())
    with engine.gathered_weights():
        before = [id(parameter) for parameter in engine.model.parameters()]
        run_all(engine, make_episodes(2), open_dialogs())
        assert [id(parameter) for parameter in engine.model.parameters()] == before


def test_kept_caches_are_released_with_their_episodes(open_dialogs: Callable[[], Episodes]) -> None:
    engine, episodes = rollout(qwen2(), max_response_tokens=40), open_dialogs()
    batch, num_kept = engine.open_batch(), []
    batch.add(episodes.add(make_episodes(20)))
    while batch.num_running or episodes.num_waiting:
        responses = batch.poll() if batch.num_running else []
        num_kept.append(batch.num_kept)
        continue_episodes(batch, episodes, responses, 0 if batch.num_running else None)
    assert max(num_kept) > 0 and batch.num_kept == 0


# Scores.


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
    episodes = Episodes(text, client)
    episode = Episode(0, Request("0-0", [2, 3], 0), {"prompt": "1+1", "answer": "2"})
    episodes.add([episode])
    assert episodes.num_waiting == 0 and episodes.is_unfinished("0-0")
    ids = [4, 5, 6]
    assert episodes.add_responses([Response("0-0", ids, [0.0] * 3, [0] * 3, truncated=True)]) == []
    assert episodes.num_waiting == 1 and episodes.is_unfinished("0-0") and episode.scores is None
    wait_until(lambda: bool(received))
    row, future = received[0]
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


def test_rewards_get_the_text_before_the_stop_string(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    letter, end = (ChatTokenizer(model.path).encode(text)[0] for text in "73")
    template = ConversationTemplate(chat_template="{{ messages[0].content }}", stop_strings=("3",))
    text = ChatTokenizer(model.path, template)
    episodes = Episodes(text, client)
    episodes.add([Episode(0, Request("0-0", [2], 0), {})])
    assert episodes.add_responses([Response("0-0", [letter, end], [0.0] * 2, [0] * 2)]) == []
    wait_until(lambda: bool(received))
    assert received[0][0]["response"] == "7"
    assert received[0][0]["token_ids"] == [letter, end]


def test_a_dropped_episode_gets_no_score(model: ModelConfig, reward: Any) -> None:
    client, received = reward
    episodes = Episodes(ChatTokenizer(model.path), client)
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
    episodes = Episodes(ChatTokenizer(model.path), client)
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
        run_episodes(rollout(source, max_response_tokens=40), own, Episodes(text, client))
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
