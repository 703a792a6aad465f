"""A conversation with one model. Sampled tokens are kept, so the model reads its responses as it generated them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.config import UserError
from flowrl.data.messages import DataError, Message
from flowrl.data.turn_delta import make_turn_delta
from flowrl.inference.text_generator import GeneratedText, PartialText, TextGenerator


class ContextFull(UserError):
    """Raised if the conversation leaves no token for another response."""


@dataclass(frozen=True)
class Turn:
    """A message of the user and the response."""

    prompt: str
    context_ids: tuple[int, ...]
    """All tokens before the response."""
    response: GeneratedText


class ChatSession:
    """The turns of a conversation, and the settings of the next response."""

    def __init__(
        self, generator: TextGenerator, *, system: str | None = None, temperature: float = 1.0, max_tokens: int = 512
    ) -> None:
        """Starts an empty conversation. Raises DataError if the model has no chat template."""
        self.generator, self.temperature, self._max_tokens = generator, temperature, max_tokens
        generator.chat.check_chat_template()
        self._system = system
        self._turns: list[Turn] = []
        self._num_outdated = 0
        """Number of turns with outdated tokens, because the system message or the model changed after these turns."""
        self.rewrites_turns = False
        """Whether the chat template changes earlier turns, so that all turns are tokenized again for each response."""

    @property
    def turns(self) -> Sequence[Turn]:
        return self._turns

    @property
    def messages(self) -> list[Message]:
        """All messages of the conversation."""
        messages = [] if self._system is None else [Message("system", self._system)]
        for turn in self._turns:
            messages += [Message("user", turn.prompt), Message("assistant", turn.response.text)]
        return messages

    @property
    def system(self) -> str | None:
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        """Sets the system message, also for existing turns, which are then tokenized again."""
        self._system, self._num_outdated = text, len(self._turns)

    def reset(self) -> None:
        """Drops all turns."""
        self._turns.clear()
        self._num_outdated = 0

    def undo(self) -> str | None:
        """Drops the last turn and returns its prompt, or None if there are no turns."""
        if not self._turns:
            return None
        dropped = self._turns.pop()
        self._num_outdated = min(self._num_outdated, len(self._turns))
        return dropped.prompt

    def copy_turns(self, other: "ChatSession") -> None:
        """Copies the turns of another conversation. They are tokenized again, because `other` has another model."""
        self._turns = list(other.turns)
        self._num_outdated = len(self._turns)

    def respond(
        self, prompt: str, *, sample: int = 0, is_interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[PartialText]:
        """Adds a turn, and yields the state of the response while it is generated.

        Args:
            prompt: message of the user.
            sample: selects the random numbers, together with the number of turns.
            is_interrupted: called between tokens; true ends the response, which stays a part of the conversation.
        Raises:
            ContextFull: the conversation has as many tokens as the model supports.
            DataError: the chat template rejects the conversation.
        """
        ids = self._encode(prompt)
        limit = self.generator.max_length
        if len(ids) >= limit:
            raise ContextFull(
                f"the conversation has {len(ids):,} tokens, but the model's limit is {limit:,}: shorten it with /undo, "
                f"or start again with /reset"
            )
        states = self.generator.stream(
            ids,
            index=len(self._turns),
            sample=sample,
            max_tokens=min(self._max_tokens, limit - len(ids)),
            temperature=self.temperature,
            is_interrupted=is_interrupted,
        )
        for state in states:
            if state.result is not None:
                self._turns.append(Turn(prompt, ids, state.result))
            yield state

    def is_full(self) -> bool:
        """Returns whether the last response ended at the limit of the model."""
        turn = self._turns[-1]
        return len(turn.context_ids) + len(turn.response.token_ids) >= self.generator.max_length

    def _encode(self, prompt: str) -> tuple[int, ...]:
        chat, message = self.generator.chat, Message("user", prompt)
        if len(self._turns) > self._num_outdated and not self.rewrites_turns:
            last = self._turns[-1]
            turns = [{"role": turn.role, "content": turn.content} for turn in self.messages[:-1]]
            try:
                delta = make_turn_delta(
                    chat, turns, last.response.token_ids, [{"role": message.role, "content": message.content}]
                )
            except DataError:  # also if the template omits the response
                self.rewrites_turns = True
            else:
                return (*last.context_ids, *last.response.token_ids, *delta.token_ids)
        ids = chat.encode_prompt([*self.messages, message])
        if not ids:
            raise DataError("the tokenizer has no tokens for the message: write another text")
        return tuple(ids)
