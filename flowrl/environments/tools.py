"""Tools from Python functions: their JSON schemas for chat templates, and checked calls."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from flowrl.config import UserError, import_function
from flowrl.environments.tool_calls import ToolCall
from flowrl.environments.user_calls import OutputLimitError, call_user, describe_error

_ARGUMENT = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_RETURNS = re.compile(r"(Returns|Raises|Yields|Examples?|Notes?):\s*")

ToolProblem = Literal["unknown_tool", "invalid_arguments", "tool_error", "tool_timeout", "result_truncated"]
"""Reason why a call has no result, or a shortened one."""


class ToolError(UserError):
    """Raised if a function cannot be a tool."""


class Tool:
    """A function that the policy can call."""

    def __init__(self, function: Callable[..., Any], bound: Sequence[str] = ()) -> None:  # Any: values of the tool
        """`bound` are names of parameters that the environment sets, such as columns of the row.

        Raises ToolError if a parameter has no type hint, or the function has no docstring.
        """
        self.function = function
        self.name = function.__name__
        self.bound = tuple(name for name in bound if name in inspect.signature(function).parameters)
        description, arguments = _parse_docstring(function)
        try:
            hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            raise ToolError(f"tool {self.name}: its type hints cannot be resolved ({error})") from error
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name in self.bound:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ToolError(f"tool {self.name}: parameter {name} cannot be passed by name; write a plain parameter")
            if name not in hints:
                raise ToolError(f"tool {self.name}: parameter {name} has no type hint; add one for the JSON schema")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], Field(default, description=arguments.get(name)))
        try:
            model = create_model(self.name, __config__=ConfigDict(extra="forbid", strict=False), **fields)
            parameters = _simplify(model.model_json_schema())
        except (PydanticUserError, TypeError, ValueError, NameError) as error:
            raise ToolError(f"tool {self.name}: its parameters have no JSON schema ({error})") from error
        self._model = model
        parameters.pop("additionalProperties", None)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def check_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:  # Any: values of JSON
        """Returns the arguments as values of their types. Raises ValueError for arguments that do not fit."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ValueError("; ".join(problems)) from error
        return {name: getattr(checked, name) for name in arguments}


def load_tools(names: Sequence[str], bound: Sequence[str] = ()) -> list[Tool]:
    """Imports tools (`module:function` or `file.py:function`). Raises ToolError or ImportNameError."""
    tools = [Tool(import_function(name), bound) for name in names]
    if len({tool.name for tool in tools}) < len(tools):
        raise ToolError(f"tools have the same name: {', '.join(tool.name for tool in tools)}; rename a function")
    return tools


async def run_tool(
    tools: Mapping[str, Tool], call: ToolCall, *, timeout_s: float, max_chars: int, bound: Mapping[str, Any]
) -> tuple[str, ToolProblem | None]:
    """Returns the result of a call as text for the model, and the reason if it has failed.

    Args:
        tools: tools by name.
        call: the call.
        timeout_s: time after which the call is given up. Its thread continues.
        max_chars: length of the result. Longer results are cut.
        bound: values of parameters that the environment sets.
    Raises:
        MemoryError, OutputLimitError: the tool has used too much.
    """
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: unknown tool {call.name[:100]!r}. Available: {', '.join(tools)}.", "unknown_tool"
    try:
        arguments = tool.check_arguments(call.arguments)
    except ValueError as error:
        return f"Error: invalid arguments for {call.name}: {error}"[:max_chars], "invalid_arguments"
    try:
        async with asyncio.timeout(timeout_s) as limit:
            result = await call_user(tool.function, **arguments, **{name: bound.get(name) for name in tool.bound})
        text = _as_text(result)
    except (MemoryError, OutputLimitError):
        raise
    except TimeoutError as error:
        if limit.expired():
            return f"Error: {call.name} did not return within {timeout_s:g} s.", "tool_timeout"
        return f"Error: {_describe(error, call.name)}"[:max_chars], "tool_error"
    except Exception as error:  # noqa: BLE001 - user code; the model reads the error
        return f"Error: {_describe(error, call.name)}"[:max_chars], "tool_error"
    if len(text) > max_chars:
        return f"{text[:max_chars]}\n[cut from {len(text)} characters]", "result_truncated"
    return text, None


def _describe(error: BaseException, name: str) -> str:
    """Returns a description without locations in files, which the model must not see."""
    return describe_error(error, name).rpartition(" (")[0] or describe_error(error, name)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return json.dumps(value, ensure_ascii=False, default=str)


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the description of a function, and those of its arguments in a section `Args:`."""
    text = inspect.getdoc(function)
    if not text:
        raise ToolError(
            f"tool {function.__name__} has no docstring: the model reads it to decide when to call the tool"
        )
    description, _, rest = text.partition("Args:\n")
    arguments: dict[str, str] = {}
    last = None
    for line in rest.splitlines():
        if line and not line[0].isspace():  # the next section
            break
        match = _ARGUMENT.fullmatch(line.strip())
        if match is not None and len(line) - len(line.lstrip()) <= 4:
            last, arguments[match[1]] = match[1], match[2]
        elif last is not None and line.strip():
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    lines = []
    for line in description.splitlines():
        if _RETURNS.match(line):
            break
        lines.append(line)
    return "\n".join(lines).strip(), arguments


def _simplify(schema: Any) -> Any:  # Any: values of JSON
    """Returns a JSON schema without titles, which models do not need."""
    if isinstance(schema, list):
        return [_simplify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _simplify(item) for name, item in value.items()} if key == "properties" else _simplify(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
