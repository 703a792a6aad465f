"""Tool calls are found in each format, and malformed ones are errors."""

import json
import time

import pytest

from flowrl.environments.tool_calls import ToolCall, ToolFormat, parse_response

ADD = ToolCall("add", {"a": 1, "b": 2})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
PLAIN = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("tool_format", "text", "count"),
    [
        ("hermes", HERMES, 1),
        ("hermes", f"I add.\n{HERMES}\n{HERMES} now", 2),
        ("hermes", f"<think>{HERMES}</think>{HERMES}", 1),
        ("llama3", LLAMA, 1),
        ("llama3", f"<|python_tag|>{LLAMA}", 1),
        ("llama3", f" {LLAMA}; {LLAMA} ", 2),
        ("llama3", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1, "b": 2}}}', 1),
        ("llama3", PLAIN, 1),
        ("json", PLAIN, 1),
        ("json", f"[{PLAIN}, {PLAIN}]", 2),
        ("json", f"I add.\n```json\n{PLAIN}\n```", 1),
        ("json", LLAMA, 1),
        ("json", f"```json\n{PLAIN}\n```\nand\n```\n[{PLAIN}]\n```", 2),
        ("json", f"```python\nadd(1, 2)\n```\nI add.\n```json\n{PLAIN}\n```", 1),
        ("json", f"```json\n{PLAIN}", 1),
        ("json", f"```json\n{PLAIN}```", 1),
    ],
)
def test_calls_are_found(tool_format: ToolFormat, text: str, count: int) -> None:
    parsed = parse_response(text, tool_format)
    assert (parsed.calls, parsed.errors) == ((ADD,) * count, ())


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "The answer is 3."),
        ("hermes", f"<think>{HERMES}"),
        ("hermes", ""),
        ("llama3", "The answer is {3}."),
        ("llama3", '{"answer": 3}'),
        ("json", '{"answer": 3}'),
        ("json", "The answer is 3."),
        ("json", "[3]"),
        ("json", "[]"),
        ("json", "[1] The answer is 3."),
        ("json", "```python\n{}\n```"),
        ("json", "```json\nadd\n```"),
    ],
)
def test_an_answer_has_no_calls(tool_format: ToolFormat, text: str) -> None:
    parsed = parse_response(text, tool_format)
    assert (parsed.calls, parsed.errors) == ((), ())


BAD = '{"name": "add", "arguments": "x"}'
BAD_LLAMA = '{"name": "add", "parameters": "x"}'
ADD_3 = ToolCall("add", {"a": 3})
PLAIN_3 = '{"name": "add", "arguments": {"a": 3}}'


@pytest.mark.parametrize(
    ("tool_format", "text", "num_errors"),
    [
        ("hermes", f"{HERMES}<tool_call>{BAD}</tool_call><tool_call>{PLAIN_3}</tool_call>", 1),
        ("llama3", f"{LLAMA}; {BAD_LLAMA}; {PLAIN_3}", 1),
        ("llama3", f"{BAD_LLAMA}; {LLAMA}; {PLAIN_3}", 1),
        ("llama3", f"{LLAMA}; {PLAIN_3}; {BAD_LLAMA}; 3", 2),
        ("llama3", f"{LLAMA} then; {PLAIN_3}", 1),
        ("llama3", f"{LLAMA}; {{'name': 'add'}}; {PLAIN_3}", 1),
        ("llama3", f'{{"name": "add", "parameters": {{; {LLAMA}; {PLAIN_3}', 1),
        ("json", f"[{PLAIN}, {BAD}, {PLAIN_3}]", 1),
        ("json", f"[{BAD}, 3, {PLAIN}, {PLAIN_3}]", 2),
        ("json", f"```json\n[{PLAIN}, {BAD}, {PLAIN_3}]\n```", 1),
        ("json", f"```\n{BAD}\n```\n```\n{PLAIN}\n```\n```\n{{\n```\n```\n{PLAIN_3}\n```", 2),
        ("json", f"[{PLAIN}, {PLAIN_3}, {{]", 1),
        ("json", f"[{PLAIN}, {PLAIN_3}", 1),
        ("json", f"[{PLAIN}, {PLAIN_3}] then", 1),
        ("json", f"[{PLAIN}, {PLAIN_3} {PLAIN}]", 1),
    ],
)
def test_a_malformed_call_does_not_discard_others(tool_format: ToolFormat, text: str, num_errors: int) -> None:
    parsed = parse_response(text, tool_format)
    assert (parsed.calls, len(parsed.errors)) == ((ADD, ADD_3), num_errors)


def test_an_argument_may_contain_a_code_block() -> None:
    arguments = {"text": "```python\nadd(1, 2)\n``` and ```x``` ```"}
    call = json.dumps({"name": "run", "arguments": arguments})
    assert parse_response(f"```json\n{call}\n```", "json").calls == (ToolCall("run", arguments),)


def test_a_call_within_a_string_of_a_malformed_call_is_not_executed() -> None:
    inner = json.dumps(f"; {LLAMA}")
    parsed = parse_response(f'{{"name": "add", "parameters": {{"a": {inner}, }}}}', "llama3")
    assert (parsed.calls, len(parsed.errors)) == ((), 1)


LONG = [
    "```" + "a" * 200_000,
    "```" + " " * 200_000,
    "```\n" * 50_000,
    "```json\n" * 25_000,
    "``` " * 50_000,
    "<think>" * 30_000,
    "<tool_call>" * 20_000,
    '{"name":' + ';{"name":' * 25_000,
    '{"name":"a"}' + ";3" * 20_000,
    "[" + '{"name":"a"},' * 15_000,
]
"""Long texts without an end, most of which have no calls."""


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "json"])
def test_the_time_of_a_search_is_linear(tool_format: ToolFormat) -> None:
    for text in LONG:
        start_s = time.process_time()
        parse_response(text, tool_format)
        assert time.process_time() - start_s < 2, text[:10]


@pytest.mark.parametrize(
    ("tool_format", "text", "num_calls"),
    [
        ("hermes", "<tool_call>", 0),
        ("hermes", HERMES.removesuffix("</tool_call>"), 0),
        ("hermes", f"<tool_call>{HERMES}", 1),
        ("hermes", "<tool_call></tool_call>", 0),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", 0),
        ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>", 0),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', 0),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', 0),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 0),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 0),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', 0),
        ("hermes", "<tool_call>3</tool_call>", 0),
        ("hermes", "<tool_call>[]</tool_call>", 0),
        ("hermes", f"<tool_call>[{PLAIN}, {PLAIN}]</tool_call>", 0),
        ("hermes", f"<tool_call>{PLAIN} {PLAIN}</tool_call>", 0),
        ("hermes", f"{HERMES}<tool_call>{{</tool_call>", 1),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", 0),
        ("llama3", "<|python_tag|>print(3)", 0),
        ("llama3", f"{LLAMA} then", 1),
        ("llama3", f"{LLAMA}; {{", 1),
        ("llama3", '{"name": "add", "parameters": 3}', 0),
        ("llama3", '{"name": "add", "parameters": {', 0),
        ("json", '{"name": "add", "arguments": ', 0),
        ("json", f"```json\n{{\n```\n{PLAIN}", 0),
        ("json", f"[{PLAIN},]", 1),
        ("json", "[" * 100_000 + '"name"', 0),
        ("json", f'[{PLAIN}, {{"arguments": {{}}}}]', 1),
        ("json", f"{PLAIN} then", 1),
        ("json", '{"name": "add", "arguments": null}', 0),
    ],
)
def test_malformed_calls_are_errors(tool_format: ToolFormat, text: str, num_calls: int) -> None:
    parsed = parse_response(text, tool_format)
    assert (len(parsed.calls), bool(parsed.errors)) == (num_calls, True)
