"""Finds the tool calls in a response, in the formats of Hermes and Qwen, of Llama 3, and as plain JSON."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3", "json"]
"""- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, with text around them (Hermes,
  Qwen 2.5, Qwen 3).
- `llama3`: the complete response is `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`. Several
  calls are separated by semicolons.
- `json`: the complete response, or a code block in it, is one object with `name` and `arguments` or a list of them.
"""

_MAX_DEPTH_ERROR = "is nested too deeply"
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]  # Any: values of JSON


@dataclass(frozen=True)
class ParsedResponse:
    """The content of a response."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """Descriptions of calls that cannot be parsed, for the model."""


class _ParseError(ValueError):
    """Raised for a call that cannot be parsed."""


def parse_response(text: str, tool_format: ToolFormat) -> ParsedResponse:
    """Returns the tool calls of a response. Text within `<think>` is ignored. Never raises an exception."""
    return _PARSERS[tool_format](_THOUGHT.sub("", text))


def _parse_hermes(text: str) -> ParsedResponse:
    calls: list[ToolCall] = []
    errors = []
    for match in _HERMES.finditer(text):
        try:
            if not match[2]:
                raise _ParseError("a tool call has no </tool_call>")
            calls.append(_parse_call(_load(match[1]), ("arguments",)))
        except _ParseError as error:
            errors.append(str(error))
    return ParsedResponse(tuple(calls), tuple(errors))


def _parse_llama3(text: str) -> ParsedResponse:
    text = text.strip()
    is_call = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).strip()
    if not is_call and not re.match(r'\{\s*"(name|type|parameters|arguments|function)"', text):
        return ParsedResponse()
    calls: list[ToolCall] = []
    decoder, position = json.JSONDecoder(), 0
    try:
        while position < len(text):
            value, position = _decode(decoder, text, position)
            calls.append(_parse_call(value, ("parameters", "arguments")))
            rest = re.compile(r"\s*(;|\Z)\s*").match(text, position)
            if rest is None:
                raise _ParseError("text follows a tool call: write only calls, separated by semicolons")
            position = rest.end()
    except _ParseError as error:
        return ParsedResponse(tuple(calls), (str(error),))
    return ParsedResponse(tuple(calls))


def _parse_json(text: str) -> ParsedResponse:
    fenced = _FENCE.search(text)
    text = (fenced[1] if fenced else text).strip()
    if not text.startswith(("{", "[")):
        return ParsedResponse()
    try:
        value = _load(text)
        values = value if isinstance(value, list) else [value]
        if not fenced and not any(isinstance(item, dict) and "name" in item for item in values):
            return ParsedResponse()  # an answer in JSON
        return ParsedResponse(tuple(_parse_call(item, ("arguments", "parameters")) for item in values))
    except _ParseError as error:
        return ParsedResponse(errors=(str(error),))


_PARSERS: Mapping[ToolFormat, Callable[[str], ParsedResponse]] = {
    "hermes": _parse_hermes,
    "llama3": _parse_llama3,
    "json": _parse_json,
}


def _load(text: str) -> Any:  # Any: values of JSON
    value, position = _decode(json.JSONDecoder(), text.strip(), 0)
    if text.strip()[position:].strip():
        raise _ParseError("text follows the JSON of a tool call")
    return value


def _decode(decoder: json.JSONDecoder, text: str, position: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, position)
    except RecursionError as error:
        raise _ParseError(f"the JSON of a tool call {_MAX_DEPTH_ERROR}") from error
    except ValueError as error:
        raise _ParseError(f"a tool call is not JSON: {error}") from error


def _parse_call(value: Any, keys: tuple[str, ...]) -> ToolCall:  # Any: values of JSON
    """Returns the call in a JSON object. `keys` are the allowed names of the arguments."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _ParseError(f'a tool call must be an object with "name" and "{keys[0]}"')
    arguments = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        raise _ParseError(f'"{keys[0]}" of the tool call {value["name"]!r} must be an object')
    return ToolCall(value["name"], arguments)
