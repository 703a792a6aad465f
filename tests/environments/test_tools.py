"""Functions become tools with JSON schemas, and their calls are checked."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from flowrl.environments.tool_calls import ToolCall
from flowrl.environments.tools import Tool, ToolError, load_tools, run_tool
from tests.environments import calculator


def call(function: Callable[..., Any], *, timeout_s: float = 30.0, **arguments: Any) -> tuple[str, str | None]:
    tool = Tool(function)
    limits = {"timeout_s": timeout_s, "max_chars": 200, "bound": {}}
    return asyncio.run(run_tool({tool.name: tool}, ToolCall(tool.name, arguments), **limits))


def test_a_schema_has_descriptions_types_and_required_parameters() -> None:
    assert Tool(calculator.add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {
                        "type": "integer",
                        "description": "The second number, which may be negative.",
                        "default": 0,
                    },
                },
                "required": ["a"],
            },
        },
    }


def test_schemas_agree_with_transformers() -> None:
    schema = Tool(calculator.lookup).schema["function"]
    expected = get_json_schema(calculator.lookup)["function"]
    schema["parameters"]["properties"]["table"].pop("additionalProperties")
    expected["parameters"]["properties"]["table"].pop("additionalProperties", None)
    assert {name: schema[name] for name in ("name", "description", "parameters")} == {
        name: expected[name] for name in ("name", "description", "parameters")
    }


def test_types_are_part_of_the_schema() -> None:
    properties = Tool(calculator.typed).schema["function"]["parameters"]["properties"]
    assert properties["unit"]["enum"] == ["m", "km"]
    assert properties["values"] == {"type": "array", "items": {"type": "number"}}


def test_bound_parameters_are_hidden() -> None:
    tool = Tool(calculator.lookup, ["table", "other"])
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["key"]
    result = run_tool(
        {"lookup": tool},
        ToolCall("lookup", {"key": "x"}),
        timeout_s=30.0,
        max_chars=200,
        bound={"table": {"x": "y"}, "other": 1},
    )
    assert asyncio.run(result) == ("y", None)


@pytest.mark.parametrize("name", ["no_docstring", "no_hint", "variadic", "no_schema", "unresolved"])
def test_a_function_that_cannot_be_a_tool_is_rejected(name: str) -> None:
    with pytest.raises(ToolError):
        Tool(getattr(calculator, name))


def test_tools_of_the_same_name_are_rejected() -> None:
    with pytest.raises(ToolError):
        load_tools(["tests.environments.calculator:add", "tests.environments.calculator:add"])


@pytest.mark.parametrize(
    ("function", "arguments", "result"),
    [
        (calculator.add, {"a": 1, "b": 2}, "3"),
        (calculator.add, {"a": "1"}, "1"),
        (calculator.wait, {"seconds": 0}, "done"),
        (calculator.typed, {"unit": "m", "values": [1, 2]}, '{"unit": "m", "sum": 3.0, "limit": null}'),
        (calculator.misbehave, {"kind": "none"}, "null"),
        (calculator.misbehave, {"kind": "surrogate"}, "?"),
        (calculator.misbehave, {"kind": "bytes"}, "\"b'\\\\xff'\""),
    ],
)
def test_results_are_text(function: Callable[..., Any], arguments: dict[str, Any], result: str) -> None:
    assert call(function, **arguments) == (result, None)


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        (calculator.add, {}, "invalid_arguments"),
        (calculator.add, {"a": "one"}, "invalid_arguments"),
        (calculator.add, {"a": 1, "c": 1}, "invalid_arguments"),
        (calculator.add, {"a": None}, "invalid_arguments"),
        (calculator.typed, {"unit": "mile", "values": []}, "invalid_arguments"),
        (calculator.typed, {"unit": "m", "values": [], "limit": 0}, "invalid_arguments"),
        (calculator.lookup, {"key": "x", "table": {}}, "tool_error"),
        (calculator.misbehave, {"kind": "system_exit"}, "tool_error"),
        (calculator.misbehave, {"kind": "unprintable"}, "tool_error"),
        (calculator.misbehave, {"kind": "circular"}, "tool_error"),
        (calculator.misbehave, {"kind": "long"}, "result_truncated"),
    ],
)
def test_problems_are_messages(function: Callable[..., Any], arguments: dict[str, Any], problem: str) -> None:
    text, found = call(function, **arguments)
    assert found == problem
    assert len(text) < 300
    assert __file__.rpartition("/")[0] not in text


@pytest.mark.parametrize("function", [calculator.wait, calculator.sleep])
def test_a_late_tool_is_a_message(function: Callable[..., Any]) -> None:
    assert call(function, timeout_s=0.1, seconds=0.5)[1] == "tool_timeout"


def test_memory_errors_are_not_hidden() -> None:
    with pytest.raises(MemoryError):
        call(calculator.misbehave, kind="memory")
