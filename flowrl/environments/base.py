"""The protocol of environments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flowrl.config import ImportNameError, UserError, import_function
from flowrl.config.user_errors import convert_errors, error_text

ChatMessage = Mapping[str, Any]  # Any: values of JSON
"""A message of a conversation: `role`, `content`, and optional fields of the chat template, such as `name`."""

Row = Mapping[str, Any]  # Any: values of JSON
"""The columns of a row of the dataset."""


@dataclass(frozen=True)
class ModelResponse:
    """A response of the policy."""

    text: str
    """Text of the response, without its end token."""

    token_ids: Sequence[int] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    """length: the response was cut at the maximum number of tokens."""

    turn: int = 0
    """Number of earlier responses of the episode."""

    tagged_text: str | None = None
    """Tags that the prompt opened, such as `<think>`, then the text with special tokens. None: equal to `text`."""

    @property
    def parsed_text(self) -> str:
        """Text in which to search for tags."""
        return self.text if self.tagged_text is None else self.tagged_text


@dataclass(frozen=True)
class Observation:
    """Result of a turn: the next messages, the reward, and whether the episode has ended."""

    messages: Sequence[ChatMessage] = ()
    """Messages that follow the response. Ignored if `done`."""

    reward: float | None = None
    """Reward of this turn. None counts as 0."""

    done: bool = False
    """True: the episode has ended."""

    info: Mapping[str, Any] = field(default_factory=dict)  # Any: values of JSON
    """Values for logs. `reason` names why an episode ended or what went wrong, and `counts` has counted events."""


class Environment(Protocol):
    """One episode. Methods may be sync: the host then calls them in a thread.

    An environment may have two attributes. `tools` has the JSON schemas for the chat template, and is read after
    `reset`. `observation_roles` has the roles of the messages of observations, with which the chat template is checked
    before a run.
    """

    async def reset(self, row: Row) -> Sequence[ChatMessage] | Sequence[int]:
        """Starts the episode. Returns the first messages, or the tokens of the prompt."""
        ...

    async def step(self, response: ModelResponse) -> Observation:
        """Returns the observation that follows a response of the policy."""
        ...

    async def close(self) -> None:
        """Releases the resources of the episode. Called once, also after failures."""
        ...


class EnvironmentLoadError(UserError):
    """Raised if an environment cannot be created."""


def create_environment(name: str, options: Mapping[str, Any]) -> Any:  # Any: a class of the user
    """Imports the class `name` and returns an environment. `options` are the arguments of the class.

    Raises EnvironmentLoadError if the class cannot be imported, rejects the options, or lacks a method.
    """

    def describe(error: BaseException) -> EnvironmentLoadError:
        return EnvironmentLoadError(
            f"{name} cannot be created with the options {dict(options)} ({error_text(error)}): correct the options or "
            f"the class"
        )

    try:
        with convert_errors(describe, keep=ImportNameError):
            environment = import_function(name)(**options)
    except ImportNameError as error:
        raise EnvironmentLoadError(str(error)) from error
    missing = [method for method in ("reset", "step", "close") if not callable(getattr(environment, method, None))]
    if missing:
        raise EnvironmentLoadError(
            f"{name} has no method {' and '.join(missing)}: name a class with the methods of "
            f"flowrl.environments.base.Environment"
        )
    roles = getattr(environment, "observation_roles", ())
    if isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
        raise EnvironmentLoadError(
            f"{name}.observation_roles is {roles!r}, but must be a sequence of roles, such as ('tool',)"
        )
    return environment


def conversation_of(row: Row) -> list[ChatMessage]:
    """Returns the conversation of a row: its column `conversation`, or its `prompt` as a user message.

    Raises ValueError if the row has neither.
    """
    conversation = row.get("conversation")
    if conversation:
        return list(conversation)
    if isinstance(prompt := row.get("prompt"), str):
        return [{"role": "user", "content": prompt}]
    raise ValueError("the row has neither a column conversation nor a column prompt: add one to the dataset")
