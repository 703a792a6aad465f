"""Environments are created from their name and options, and invalid ones are reported."""

from collections.abc import Sequence
from typing import Any

import pytest

from flowrl.environments.base import ChatMessage, EnvironmentLoadError, conversation_of, create_environment
from flowrl.environments.tool_environment import ToolEnvironment
from tests.errors import rejects

TOOLS = "flowrl.environments.tool_environment:ToolEnvironment"


class WithoutClose:
    def reset(self, row: dict[str, Any]) -> Sequence[ChatMessage]:
        return conversation_of(row)

    def step(self, response: object) -> None:
        raise NotImplementedError


def create(error: str) -> None:
    raise {"division": ZeroDivisionError, "interrupt": KeyboardInterrupt}[error]


class OneRole(WithoutClose):
    observation_roles = "tool"

    def close(self) -> None:
        pass


def test_options_are_arguments_of_the_class() -> None:
    environment = create_environment(TOOLS, {"tools": ["tests.environments.calculator:add"], "result_role": "user"})
    assert isinstance(environment, ToolEnvironment)
    assert environment.observation_roles == ("user",) and environment.tools[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("tests.environments.no_such_module:Class", {}, ("tests.environments.no_such_module",)),
        ("tests.environments.test_base:NoClass", {}, ("NoClass",)),
        (TOOLS, {"tools": [], "num_turns": 3}, ("ToolEnvironment", "num_turns")),
        (TOOLS, {"tools": [], "max_turns": 0}, ("ToolEnvironment", "max_turns")),
        ("tests.environments.test_base:create", {"error": "division"}, ("division", "ZeroDivisionError")),
        ("tests.environments.test_base:WithoutClose", {}, ("close",)),
        ("tests.environments.test_base:OneRole", {}, ("tool", "roles")),
    ],
)
def test_an_environment_that_cannot_be_created_is_named(
    name: str, options: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with rejects(*facts, error=EnvironmentLoadError):
        create_environment(name, options)


def test_an_interrupt_is_no_error_of_the_class() -> None:
    with pytest.raises(KeyboardInterrupt):
        create_environment("tests.environments.test_base:create", {"error": "interrupt"})
