"""Locates the trained text of a rendered conversation: the assistant's responses, including the end of each turn.

For each sequence of roles, the chat template is rendered once with a marker as the content of each message. The text
between the markers is the same for all conversations with these roles, unless the chat template depends on the content.
A rendered conversation must consist of this text and the contents of its messages. Otherwise, no span is returned.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.data.messages import DataError, Message, Speaker

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without the generation prompt."""

_MARKER = re.compile("\ue000(\\d+)\ue001")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Response:
    lead: int
    """Number of characters before the content that the model generates, such as a space."""
    tail: int
    """Number of characters from the content to the end of the turn."""
    appended: str
    """End of the turn that the template omits after the last message."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The rendered text of all conversations with certain roles."""

    literals: tuple[str, ...]
    """Text before, between and after the contents. There is one literal more than contents (`order`)."""
    order: tuple[int, ...]
    """Indices of the messages whose contents are between the literals."""
    responses: dict[int, _Response]
    """Index of an assistant's message -> the trained text around its content."""

    def locate(self, text: str, contents: Sequence[str], first: int) -> tuple[str, list[Span]] | None:
        """Returns the text, with a missing end of the last turn appended, and the spans of responses from `first` on.

        Returns None if the text does not consist of the literals and the contents. The template may remove the white
        space around contents.
        """
        positions = self._match(text, contents)
        if positions is None:
            return None
        spans = []
        for index, (start, end) in positions.items():
            response = self.responses.get(index)
            if response is None or index < first:
                continue
            content = text[start:end].rstrip()
            if response.appended and content.endswith(response.appended):
                spans.append((start - response.lead, start + len(content)))
                continue
            text += response.appended
            spans.append((start - response.lead, end + response.tail + len(response.appended)))
        return text, spans

    def _match(self, text: str, contents: Sequence[str]) -> dict[int, Span] | None:
        """Returns the span of each content, or None if a content is not found."""
        open_matches: list[tuple[int, int, dict[int, Span]]] = [(0, 0, {})]
        while open_matches:
            piece, position, spans = open_matches.pop()
            literal = self.literals[piece]
            if not text.startswith(literal, position):
                continue
            position += len(literal)
            if piece == len(self.order):
                if position == len(text):
                    return spans
                continue
            index = self.order[piece]
            content = contents[index]
            variants = dict.fromkeys((content.rstrip(), content.lstrip(), content.strip(), content))
            matching = [variant for variant in variants if text.startswith(variant, position)]
            for variant in matching:
                end = position + len(variant)
                # A single match reuses the dictionary, because copies would be slow for long conversations.
                extended = spans if len(matching) == 1 else dict(spans)
                extended[index] = (position, end)
                open_matches.append((piece + 1, end, extended))
        return None


def make_layout(roles: Sequence[Speaker], render: Render, end: str, *, can_append: bool) -> TurnLayout:
    """Returns the layout of conversations with these roles.

    Args:
        roles: role of each message.
        render: the chat template.
        end: the end of the assistant's turn.
        can_append: whether to append `end` if the template omits it after the last message.
    Raises:
        DataError: the template rejects the roles, or a turn of the assistant does not end with `end`.
    """
    marked = [Message(role, f"\ue000{index}\ue001") for index, role in enumerate(roles)]
    text = render(marked, False)
    parts = _MARKER.split(text)
    literals, order = tuple(parts[::2]), tuple(map(int, parts[1::2]))
    responses = {}
    for index, role in enumerate(roles):
        if role != "assistant":
            continue
        if order.count(index) != 1:
            raise DataError(f"the chat template renders message {index + 1}, a response, {order.count(index)} times")
        piece = order.index(index)
        lead = _lead(literals[piece], text, render(marked[:index], True))
        is_last = piece == len(order) - 1
        responses[index] = _end(literals[piece + 1], end, lead, is_last and can_append)
    return TurnLayout(literals, order, responses)


def _lead(literal: str, text: str, prompt: str) -> int:
    """Returns the number of characters between the generation prompt and the content that follows `literal`."""
    generated = _MARKER.split(prompt)[-1]
    return len(literal) - len(generated) if literal.startswith(generated) else 0


def _end(literal: str, end: str, lead: int, can_append: bool) -> _Response:
    position = literal.find(end)
    if position >= 0 and not literal[:position].strip():
        return _Response(lead, position + len(end), "")
    if not literal.strip() and can_append:
        return _Response(lead, len(literal), end)
    raise DataError(
        f"the chat template adds {literal[:40]!r} after a response, but must add {end!r}: correct the chat template or "
        f"end_of_assistant"
    )


def infer_end(render: Render, eos: str, special: Sequence[str]) -> str | None:
    """Returns the end of the assistant's turn: the end token, or else the special token that follows a response."""
    probe = [Message("user", "\ue0000\ue001"), Message("assistant", "\ue0001\ue001")]
    try:
        text = render(probe, False)
    except DataError:
        return None
    after = _MARKER.split(text)[-1] if "\ue0001\ue001" in text else ""
    if eos in after:
        return eos
    return next((token for token in special if after.strip() == token), None)


def locate_responses(end: str, text: str, messages: Sequence[Message], render: Render, first: int) -> list[Span]:
    """Returns the spans of the responses from `first` on in a rendered conversation. Used if no layout matches.

    Renders the turns up to each response, and these turns with a marker as the response, to find the text after the
    response. Therefore, an end of turn within the response is never mistaken for the end of the response.

    Raises DataError if the template renders earlier messages differently when more messages follow, or if a response is
    not followed by `end`, or by white space and `end`.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.role != "assistant" or index < first:
            continue
        prompt, until = render(messages[:index], True), render(messages[: index + 1], False)
        if not (until.startswith(prompt) and text.startswith(until)):
            raise DataError(
                "the chat template renders earlier messages differently when more messages follow, so the assistant's "
                "tokens cannot be located; use single-turn conversations, train only the last turn, or use another "
                "template"
            )
        after = text_after(messages[:index], render)
        tail = _end(after, end, 0, False).tail
        if not until.endswith(after):
            raise DataError(f"the chat template does not add {after[:40]!r} after every response")
        spans.append((len(prompt), len(until) - len(after) + tail))
    return spans


def text_after(messages: Sequence[Message], render: Render) -> str:
    """Returns the text that the template renders after a response that follows `messages` as the last message."""
    marker = "\ue002"
    while any(marker in message.content for message in messages):
        marker += "\ue002"
    _, found, after = render([*messages, Message("assistant", marker)], False).rpartition(marker)
    if not found:
        raise DataError(f"the chat template does not render message {len(messages) + 1}, a response")
    return after
