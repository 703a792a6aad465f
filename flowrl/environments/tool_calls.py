"""Finds the tool calls in a response, in the formats of Hermes and Qwen, of Llama 3, and as plain JSON."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3", "json"]
"""- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, with text around them (Hermes,
  Qwen 2.5, Qwen 3).
- `llama3`: the complete response is `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`. Several
  calls are separated by semicolons.
- `json`: the complete response, or each code block in it, is one object with `name` and `arguments` or a list of them.
"""

_TRAILING_TEXT = "text follows the JSON of a tool call"
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:```[ \t]*+$|\Z)", re.DOTALL | re.MULTILINE)
"""A code block. It ends at the end of a line, because a string of JSON may contain the characters of a fence."""
_PYTHON_TAG = "<|python_tag|>"
_CALL_START = r'\{\s*"(?:name|type|parameters|arguments|function)"'
_NEXT_CALL = re.compile(rf";\s*(?={_CALL_START})")
"""Separator before a call. It never matches in a string of JSON, where quotation marks are escaped."""
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
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
    """Descriptions of calls that cannot be parsed, for the model. The other calls are in `calls`."""


class _ParseError(ValueError):
    """Raised for a call that cannot be parsed."""


def parse_response(text: str, tool_format: ToolFormat) -> ParsedResponse:
    """Returns the tool calls of a response. Text within `<think>` is ignored. Never raises an exception.

    `text` contains special tokens, and begins with the tags that the prompt opened (`ModelResponse.parsed_text`).
    """
    results = list(_PARSERS[tool_format](_THOUGHT.sub("", text)))
    calls = tuple(result for result in results if isinstance(result, ToolCall))
    return ParsedResponse(calls, tuple(str(result) for result in results if isinstance(result, _ParseError)))


def _parse_hermes(text: str) -> Iterator[ToolCall | _ParseError]:
    for match in _HERMES.finditer(text):
        if not match[2]:
            yield _ParseError("a tool call has no </tool_call>")
            continue
        try:
            value, end = _decode(match[1], 0)
            if end < len(match[1]):
                raise _ParseError(_TRAILING_TEXT)
            yield _read_call(value, ("arguments",))
        except _ParseError as error:
            yield error


def _parse_llama3(text: str) -> Iterator[ToolCall | _ParseError]:
    text = text.strip()
    is_call = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).strip()
    if not is_call and not re.match(_CALL_START, text):
        return
    for part in _NEXT_CALL.split(text):
        position = 0
        while position < len(part):
            try:
                value, position = _decode(part, position)
            except _ParseError as error:
                yield error
                break
            yield _read_call(value, ("parameters", "arguments"))
            if not part.startswith(";", position) and position < len(part):
                yield _ParseError("text follows a tool call: write only calls, separated by semicolons")
                break
            position = _skip_space(part, position + 1)


def _parse_json(text: str) -> Iterator[ToolCall | _ParseError]:
    blocks = [block for language, block in _FENCE.findall(text) if language in ("", "json")]
    for block in map(str.strip, blocks or [text]):
        if not block.startswith(("{", "[")):
            continue
        values, error = _load_items(block)
        has_name = any(isinstance(value, dict) and "name" in value for value in values)
        if not blocks and not has_name and (error is None or '"name"' not in block):
            continue  # an answer in JSON, or an answer that begins with a bracket
        yield from (_read_call(value, ("arguments", "parameters")) for value in values)
        if error is not None:
            yield error


_PARSERS: Mapping[ToolFormat, Callable[[str], Iterator[ToolCall | _ParseError]]] = {
    "hermes": _parse_hermes,
    "llama3": _parse_llama3,
    "json": _parse_json,
}


def _load_items(text: str) -> tuple[list[Any], _ParseError | None]:  # Any: values of JSON
    """Returns the items of a JSON list, or a list with another value. After an error, returns the items before it."""
    items: list[Any] = []
    is_list = text.startswith("[")
    try:
        if re.fullmatch(r"\[\s*\]", text):
            return items, None
        position, is_open = int(is_list), True
        while is_open:
            value, position = _decode(text, position)
            items.append(value)
            is_open = is_list and text.startswith(",", position)
            position += is_open
        if is_list and not text.startswith("]", position):
            raise _ParseError("the tool calls of a list must be separated by commas and end with ]")
        if text[position + is_list :].strip():
            raise _ParseError(_TRAILING_TEXT)
    except _ParseError as error:
        return items, error
    return items, None


def _decode(text: str, position: int) -> tuple[Any, int]:
    """Returns the JSON value at a position, and the position after it. Skips white space before and after."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, position))
    except RecursionError as error:
        raise _ParseError("the JSON of a tool call is nested too deeply") from error
    except ValueError as error:
        raise _ParseError(f"a tool call is not JSON: {error}") from error
    return value, _skip_space(text, end)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "the pattern matches an empty text"
    return match.end()


def _read_call(value: Any, keys: tuple[str, ...]) -> ToolCall | _ParseError:  # Any: values of JSON
    """Returns the call in a JSON object, or its error. `keys` are the allowed names of the arguments."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _ParseError(f'a tool call must be an object with "name" and "{keys[0]}"')
    arguments = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return _ParseError(f'"{keys[0]}" of the tool call {value["name"]!r} must be an object')
    return ToolCall(value["name"], arguments)
