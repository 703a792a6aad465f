"""Tokens between two responses of an episode: the end of the turn, the observation, and the next generation prompt.

The tokens of responses are never changed. The chat template is rendered with a marker as the content of the newest
response. The text after the marker is tokenized and appended. A template is rejected if its text of earlier turns
depends on later messages, because the policy would be trained on tokens that it does not read in deployment. There are
two checks:

- The rendering with the new messages starts with the rendering before the response.
- The rendering with the response itself differs from the rendering with the marker only in the response and in white
  space.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import DataError

ChatMessage = Mapping[str, Any]  # Any: values of JSON
"""A message with `role`, `content`, and optional fields of the chat template."""

_MARKER = "\ue003"


class TurnRewriteError(DataError):
    """Raised if the chat template renders an earlier turn differently when messages follow."""

    def __init__(self, message: str, turn: int) -> None:
        super().__init__(message)
        self.turn = turn
        """Index of the first changed message."""


@dataclass(frozen=True)
class TurnDelta:
    """The continuation of an episode after a response."""

    token_ids: tuple[int, ...]
    """Tokens to append after the sampled tokens. The next response follows them."""

    text: str
    """Text of the tokens."""

    messages: tuple[ChatMessage, ...]
    """The conversation with the response and the observation."""


def make_turn_delta(
    chat: ChatTokenizer,
    messages: Sequence[ChatMessage],
    response_ids: Sequence[int],
    observation: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),  # Any: values of JSON
) -> TurnDelta:
    """Returns the tokens that follow a sampled response.

    Args:
        chat: the tokenizer of the policy.
        messages: the conversation before the response: the first messages, or `TurnDelta.messages` of the last turn.
        response_ids: the sampled tokens, with or without the tokens that end a turn.
        observation: the messages after the response.
        tools: JSON schemas of tools for the chat template.
    Raises:
        TurnRewriteError: the template renders an earlier turn differently when the observation follows.
        DataError: the template rejects the conversation or omits the response.
    """
    if not observation:
        raise DataError("an observation has no messages: return at least one message, or end the episode")
    body, stop = chat.split_stop(response_ids)
    response: ChatMessage = {"role": "assistant", "content": chat.decode_all(body)}
    marker = _MARKER
    while any(marker in str(message["content"]) for message in (*messages, response, *observation)):
        marker += _MARKER
    before = _render(chat, messages, tools)
    lead, after = _around_marker(chat, messages, marker, observation, tools, before)
    _check_response(chat, messages, response, observation, tools, (before, lead, after))
    text = _without_stop(after, chat.decode_all(stop) if stop else "")
    previous = chat.decode_all(list(response_ids[-4:]))
    ids, mask = chat.encode_spans(previous + text, [(len(previous), len(previous) + len(text))])
    token_ids = tuple(token for token, is_new in zip(ids, mask, strict=True) if is_new)
    return TurnDelta(token_ids, text, (*messages, response, *observation))


def check_turn_template(
    chat: ChatTokenizer, roles: Sequence[str] = ("user",), tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Checks with short conversations of three turns that a template can continue episodes.

    Args:
        chat: the tokenizer of the policy.
        roles: roles of the messages of observations.
        tools: JSON schemas of tools for the chat template.
    Raises:
        TurnRewriteError: the template rewrites earlier turns. The removal of thoughts is detected for thoughts within
            `<think>`.
        DataError: the template rejects the conversation.
    """
    thought = "<think>\nb\n</think>\n\nc"
    source = chat.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": thought}], generate=False)
    responses = ("b", thought) if thought in source else ("b",)
    for response in responses:
        messages: Sequence[ChatMessage] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            observation = [{"role": role, "content": "d"} for role in roles]
            messages = make_turn_delta(chat, messages, chat.encode(response), observation, tools).messages


def _render(chat: ChatTokenizer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
    return chat.render(chat.with_system(messages), generate=True, tools=tools)


def _around_marker(
    chat: ChatTokenizer,
    messages: Sequence[ChatMessage],
    marker: str,
    observation: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    before: str,
) -> tuple[str, str]:
    """Returns the text between the generation prompt and the response, and the text after the response."""
    turns = [*messages, {"role": "assistant", "content": marker}, *observation]
    rendered = _render(chat, turns, tools)
    if not rendered.startswith(before):
        raise _rewrite_error(chat, messages, turns, tools)
    lead, found, after = rendered[len(before) :].partition(marker)
    if not found or marker in after:
        raise DataError(
            f"the chat template does not render message {len(messages) + 1}, a response, exactly once when messages "
            "follow: use another chat template"
        )
    return lead, after


def _check_response(
    chat: ChatTokenizer,
    messages: Sequence[ChatMessage],
    response: ChatMessage,
    observation: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    parts: tuple[str, str, str],
) -> None:
    """Raises TurnRewriteError if the template changes more than white space in the newest response."""
    before, lead, after = parts
    rendered = _render(chat, [*messages, response, *observation], tools)
    expected = f"{lead}{response['content']}{after}"
    if not rendered.startswith(before):
        raise _rewrite_error(chat, messages, [*messages, response, *observation], tools)
    if rendered[len(before) :] == expected or _squeeze(rendered[len(before) :]) == _squeeze(expected):
        return
    shown = rendered[len(before) + len(lead) :][:80]
    raise TurnRewriteError(
        f"the chat template changes message {len(messages) + 1}, a response, when a message with the role "
        f"{observation[0]['role']} follows: the response begins {response['content'][:80]!r}, but is rendered as "
        f"{shown!r}; use a chat template that keeps earlier turns, such as one that does not remove thoughts, or end "
        "the episode after one turn",
        len(messages),
    )


def _rewrite_error(
    chat: ChatTokenizer,
    messages: Sequence[ChatMessage],
    turns: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
) -> TurnRewriteError:
    """Returns an error that names the first message whose text changes when messages follow."""
    before, after = _render(chat, messages, tools), _render(chat, turns, tools)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    turn = len(messages) - 1
    for index in range(len(messages)):
        # A message that is left out changes the text from its own position on.
        start = _start_of(chat, messages, index, tools, before)
        if start is not None and start > common:
            turn = max(0, index - 1)
            break
    role = messages[turn]["role"]
    return TurnRewriteError(
        f"the chat template changes message {turn + 1} (role {role}) when a message with the role "
        f"{turns[len(messages) + 1]['role']} follows: it renders {before[common : common + 60]!r} before and "
        f"{after[common : common + 60]!r} after; use a chat template that keeps earlier turns, or end the episode "
        "after one turn",
        turn,
    )


def _start_of(
    chat: ChatTokenizer,
    messages: Sequence[ChatMessage],
    index: int,
    tools: Sequence[Mapping[str, Any]],
    text: str,
) -> int | None:
    """Returns the position of the content of a message in a rendered conversation, or None if it is unknown."""
    marker = _MARKER * 2
    marked = [{**message, "content": marker} if i == index else message for i, message in enumerate(messages)]
    try:
        start = _render(chat, marked, tools).find(marker)
    except DataError:  # a template that reads the contents
        return None
    return start if 0 <= start <= len(text) else None


def _without_stop(text: str, stop: str) -> str:
    """Returns the text after a response without the end of turn, if the policy has generated this end itself."""
    position = text.find(stop) if stop else -1
    is_end = position >= 0 and not text[:position].strip()
    return text[position + len(stop) :] if is_end else text


def _squeeze(text: str) -> str:
    return "".join(text.split())
