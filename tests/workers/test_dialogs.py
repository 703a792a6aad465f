"""Dialogs with an environment worker whose replies are scripted."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from flowrl.data.batch.tensordicts import lengths, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.rollout.base import Request, Response
from flowrl.environments.base import Observation
from flowrl.environments.requests import Close, Reply
from flowrl.rewards.reward_function import RewardError
from flowrl.workers.channel import RequestClient, RequestServer
from flowrl.workers.dialogs import Dialogs, turn_columns
from flowrl.workers.episodes import Episode
from flowrl.workers.rollout import episodes_to_tensordict
from tests.data.test_turn_delta import make_chat, user

KEY = b"key"
START = Reply(Observation([user("a")]))
ASKS_AGAIN = Reply(Observation([user("b")], reward=0.5))
FAILS = Reply(failure="raised", message="the tool broke")
ENDS = Reply(Observation(reward=1.0, done=True, info={"reason": "answer"}))


def play(
    chat: ChatTokenizer, replies: Sequence[Reply], *, stops_on_failure: bool = False, max_response_tokens: int = 100
) -> Episode:
    """Returns an episode of two turns at most, whose environment gives these replies."""
    script = iter(replies)

    def answer(request: object, connection: object) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(Reply() if isinstance(request, Close) else next(script))
        return future

    with (
        closing(RequestServer("127.0.0.1", 0, KEY, answer)) as server,
        closing(RequestClient([server.address], KEY)) as client,
    ):
        dialogs = Dialogs(
            chat,
            client,
            max_response_tokens=max_response_tokens,
            max_prompt_tokens=100,
            restarts=0,
            stops_on_failure=stops_on_failure,
        )
        episode = Episode(0, Request("0", [], key=0), {"prompt": "a"})
        (episode.dialog,) = dialogs.start([episode])
        while not dialogs.pop_ended():
            for request in dialogs.receive(10.0):
                token_ids = chat.encode("c")
                dialogs.send(
                    [(episode, Response(request.request_id, token_ids, [0.0] * len(token_ids), [0] * len(token_ids)))]
                )
        return episode


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    return make_chat("chatml", tmp_path)


def test_the_score_is_the_sum_of_the_rewards_of_turns(chat: ChatTokenizer) -> None:
    episode = play(chat, [START, ASKS_AGAIN, ENDS])
    assert episode.scores is not None and episode.scores.values == {"scores": 1.5}
    rewards, records = turn_columns([episode])
    assert [reward for reward in rewards if reward] == [0.5, 1.0]
    assert records == [{"turns": 2, "restarts": 0, "counts": {}, "reason": "answer"}]


def test_a_record_has_the_prompt_of_reset_if_it_differs(chat: ChatTokenizer) -> None:
    asked = Reply(Observation([{"role": "system", "content": "a"}, user("c")]))
    tokens = Reply(prompt_ids=tuple(chat.encode("ba")))
    for reply, expected in ((asked, "c"), (tokens, "ba")):
        (record,) = turn_columns([play(chat, [reply, ENDS])])[1]
        assert record["prompt"] == expected
    assert "prompt" not in turn_columns([play(chat, [START, ENDS])])[1][0]


def test_an_episode_without_tokens_for_its_next_turn_ends_with_a_counted_reason(chat: ChatTokenizer) -> None:
    """The response has one token, and the observation and the next turn need more than the second."""
    episode = play(chat, [START, ASKS_AGAIN], max_response_tokens=2)
    assert episode.response is not None and episode.response.truncated
    assert episode.scores is not None and episode.scores.values == {"scores": 0.5}
    (record,) = turn_columns([episode])[1]
    assert record == {"turns": 1, "restarts": 0, "counts": {"max_tokens": 1}, "reason": "max_tokens"}


def test_a_failed_episode_has_no_reward_in_any_turn(chat: ChatTokenizer) -> None:
    episode = play(chat, [START, ASKS_AGAIN, FAILS])
    assert episode.scores is not None and episode.scores.values == {"scores": 0.0}
    rewards, records = turn_columns([episode])
    assert set(rewards) == {0.0} and records[0]["turns"] == 2


def test_an_episode_whose_reset_failed_has_no_trained_token(chat: ChatTokenizer) -> None:
    failed, played = play(chat, [FAILS]), play(chat, [START, FAILS])
    table = episodes_to_tensordict([failed, played], chat, ["scores"])
    assert table["rows", "reward_failed"].tolist() == [True, True]
    failed_mask, played_mask = table["tokens", "response_mask"].split(lengths(table).tolist())
    assert not failed_mask.any() and played_mask.any()
    assert not table["tokens", "rollout_logprobs"][: len(failed_mask)].any()
    assert set(table["tokens", "weight_version"][: len(failed_mask)].tolist()) == {-1}


def test_segments_have_the_text_of_both_producers(chat: ChatTokenizer) -> None:
    played, failed = play(chat, [START, ASKS_AGAIN, ENDS]), play(chat, [FAILS])
    table = episodes_to_tensordict([played, failed], chat, ["scores"], with_segments=True)
    parts, none = objects(table, "segments")
    assert none == []
    assert [part["kind"] for part in parts] == ["policy", "environment", "policy"]
    assert [part["start"] for part in parts] == [0, *(part["end"] for part in parts[:-1])]
    assert parts[0]["text"] == parts[2]["text"] == "c"
    assert chat.encode(parts[1]["text"]) == list(played.request.segments[1].token_ids)
    mask_T = table["tokens", "response_mask"][: int(lengths(table)[0])]
    expected = [part["kind"] == "policy" for part in parts for _ in range(part["start"], part["end"])]
    assert mask_T[-len(expected) :].tolist() == expected


def test_a_failed_episode_stops_the_run_on_request(chat: ChatTokenizer) -> None:
    with pytest.raises(RewardError, match="the tool broke"):
        play(chat, [START, FAILS], stops_on_failure=True)


@pytest.mark.parametrize("excess", [0, 5])
def test_an_unknown_token_of_reset_is_an_error(chat: ChatTokenizer, excess: int) -> None:
    known, unknown = len(chat) - 1, len(chat) + excess
    with pytest.raises(RewardError, match=rf"token id {unknown}.* 0 to {known}"):
        play(chat, [Reply(prompt_ids=(0, unknown, known)), ENDS], stops_on_failure=True)
    episode = play(chat, [Reply(prompt_ids=(0, known)), ENDS], stops_on_failure=True)
    assert episode.request.token_ids == (0, known)
