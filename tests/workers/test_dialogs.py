"""Dialogs with an environment worker whose replies are scripted."""

import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from flowrl.data.batch.tensordicts import lengths, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.data.template import ConversationTemplate
from flowrl.engines.rollout.base import Request, Response
from flowrl.environments.base import ModelResponse, Observation
from flowrl.environments.requests import Close, Reply, Step
from flowrl.environments.tool_calls import parse_response
from flowrl.rewards.reward_function import RewardError
from flowrl.user_code.channel import RequestClient, RequestServer
from flowrl.workers.dialogs import Dialogs, turn_columns
from flowrl.workers.episodes import Episode, episodes_to_tensordict
from tests.data.test_golden_templates import tokenizer
from tests.data.test_turn_delta import make_chat, user

KEY = b"key"
THINKING = ConversationTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    end_of_assistant="<|im_end|>",
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
START = Reply(Observation([user("a")]))
ASKS_AGAIN = Reply(Observation([user("b")], reward=0.5))
FAILS = Reply(failure="raised", message="the tool broke")
ENDS = Reply(Observation(reward=1.0, done=True, info={"reason": "answer"}))


def play(
    chat: ChatTokenizer,
    replies: Sequence[Reply],
    *,
    text: str = "c",
    responses: list[ModelResponse] | None = None,
    stops_on_failure: bool = False,
    max_response_tokens: int = 100,
) -> Episode:
    """Returns an episode of two turns at most, whose environment gives these replies.

    `text` is the response of the policy in each turn. `responses` receives them as the environment does.
    """
    script = iter(replies)

    def answer(request: object, connection: object) -> Future[Reply]:
        if isinstance(request, Step) and responses is not None:
            responses.append(request.response)
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
                token_ids = chat.encode(text)
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


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("special", [(), TAGS])
def test_calls_are_found_if_the_prompt_opened_a_thought_and_if_tags_are_special(
    tmp_path: Path, special: Sequence[str]
) -> None:
    """In both turns, the generation prompt ends with `<think>`. A call within the thought is not executed."""
    chat = ChatTokenizer(tokenizer(tmp_path, "<|endoftext|>", "<|im_end|>", special), THINKING)
    for text, num_calls in ((f"{CALL} no</think>42", 0), (f"no</think>{CALL}", 1), (CALL, 0)):
        responses: list[ModelResponse] = []
        play(chat, [START, ASKS_AGAIN, ENDS], text=f"{text}<|im_end|>", responses=responses)
        parsed = [parse_response(response.parsed_text, "hermes") for response in responses]
        assert [(len(one.calls), one.errors) for one in parsed] == [(num_calls, ())] * 2
        assert {response.text for response in responses} == {re.sub("</?[a-z_]+>", "", text) if special else text}


def test_an_environment_gets_the_text_before_the_stop_string(tmp_path: Path) -> None:
    template = ConversationTemplate("{{ messages[-1].content }}", end_of_assistant="\nUser:")
    chat, responses = ChatTokenizer(tokenizer(tmp_path), template), []
    play(chat, [START, ENDS], text="c\nUser:", responses=responses)
    assert [(response.text, response.tagged_text) for response in responses] == [("c", None)]
    assert list(responses[0].token_ids) == chat.encode("c\nUser:")


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
