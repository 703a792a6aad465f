"""Reward for Python programs: runs the code of a response against unit tests in a sandbox."""

import ast
import json
import logging
import re
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flowrl.user_code.sandbox.launch import Sandbox, SandboxLimits, find_missing_protections

_logger = logging.getLogger(__name__)

_OPENING = re.compile(r"([ \t]*+(?:(?:[-*+]|\d++[.)])[ \t]++)?)```[ \t]*+(\w*+)")
_PYTHON = ("python", "python3", "py")
_MAX_CODE = 200_000
"""Largest response, in characters, that is searched for code."""


@dataclass(frozen=True)
class _Program:
    """A test of a program: its output for an input."""

    stdin: str
    output: str


@dataclass(frozen=True)
class _Statements:
    """A test that calls functions of the code."""

    code: str

    entry_point: str | None = None
    """The only function that the test calls. None: `entry_point` of the row."""

    needs_entry_point: bool = False
    """The code only defines the function `check`, which is then called with the entry point."""


def score(
    response: str,
    tests: object,
    entry_point: str | None = None,
    *,
    all_or_nothing: bool = False,
    max_tests: int | None = None,
    timeout_s: float = 5.0,
    total_timeout_s: float = 30.0,
    memory_mb: float = 512.0,
    max_processes: int = 32,
    max_file_mb: float = 16.0,
    **columns: object,
) -> float:
    """Returns the share of tests that the code of a response passes.

    Args:
        response: the text. `find_code` describes which of its blocks is the code.
        tests: the tests, or their JSON text. docs/rewards.md describes the formats.
        entry_point: name of the tested function. None: tests may use all functions of the code.
        all_or_nothing: returns 1 if the code passes all tests, otherwise 0.
        max_tests: number of tests to run, from the start. None runs all.
        timeout_s: wall time of each test.
        total_timeout_s: wall time of all tests. Then the remaining tests fail. Must be below `reward.timeout_s`, which
            ends the process of the function.
        memory_mb: memory of each test, over all processes.
        max_processes: number of processes and threads of a test.
        max_file_mb: largest file, also the largest output.
        columns: ignored.
    Raises:
        ValueError: `tests` has an unknown format, or contains no test, or a test is a function `check` and
            there is no `entry_point`.
    """
    known = _read_tests(tests)[:max_tests]
    if not entry_point and any(isinstance(test, _Statements) and test.needs_entry_point for test in known):
        raise ValueError(
            "a test defines the function check, but nothing calls it: write the name of the tested function into the "
            "column entry_point, or call check in the test (docs/rewards.md)"
        )
    code = find_code(response)
    if code is None or not _is_valid(code):
        return 0.0
    _warn_of_missing_protections()
    limits = SandboxLimits(timeout_s, memory_mb, max_processes, max_file_mb)
    deadline_s = time.monotonic() + total_timeout_s
    passed = 0
    for test in known:
        left_s = deadline_s - time.monotonic()
        is_passed = left_s > 0 and _passes(code, test, entry_point, replace(limits, timeout_s=min(timeout_s, left_s)))
        if all_or_nothing and not is_passed:
            return 0.0
        passed += is_passed
    return passed / len(known)


def find_code(response: str) -> str | None:
    """Returns the content of the last fenced block with the language python, otherwise of the last block without a
    language, or None. A block in a list, whose fence is indented, loses the common indentation of its lines.
    """
    blocks = list(_find_blocks(response[-_MAX_CODE:]))
    for languages in (_PYTHON, ("",)):
        for prefix, language, code in reversed(blocks):
            if language.lower() in languages:
                return textwrap.dedent(code) if prefix else code
    return None


def _find_blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields the fenced blocks of a text: the text before the opening fence, the language, and the content."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if opening is None:
            opening, lines = _OPENING.match(line), []
        elif line.strip(" \t") == "```":
            yield opening[1], opening[2], "".join(lines)
            opening = None
        else:
            lines.append(f"{line}\n")


def _is_valid(code: str) -> bool:
    try:
        compile(code, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


@lru_cache(maxsize=1)
def _warn_of_missing_protections() -> None:
    if missing := find_missing_protections():
        _logger.warning(
            "code tests run without the protections %s, which this system does not offer: use a machine for code "
            "tests, or see docs/rewards.md",
            ", ".join(missing),
        )


def _passes(code: str, test: _Program | _Statements, entry_point: str | None, limits: SandboxLimits) -> bool:
    if isinstance(test, _Program):
        with Sandbox("program", code, limits, stdin=test.stdin) as sandbox:
            return sandbox.wait() == 0 and _lines(sandbox.read_output()) == _lines(test.output)
    entry_point = test.entry_point or entry_point or None
    code_end, test_end = socket.socketpair()
    # The statements run in another sandbox than the code, which therefore cannot read or replace them.
    with (
        Sandbox("serve", code, limits, connection=code_end),
        Sandbox("check", test.code, limits, connection=test_end, entry_point=entry_point) as checker,
    ):
        return checker.wait() == 0


def _lines(text: str) -> list[str]:
    """Returns the lines without white space at their end, and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


# Formats of tests.


def _read_tests(tests: object) -> Sequence[_Program | _Statements]:
    """Returns the tests of a row. Raises ValueError for an unknown format."""
    if isinstance(tests, str):
        return _read_text(tests)
    if isinstance(tests, Mapping):
        tests = list(_read_columns(tests))
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"tests is {str(tests)[:200]!r}, but must be a list with at least one test (docs/rewards.md)")
    return [_read_test(test) for test in tests]


@lru_cache(maxsize=256)
def _read_text(text: str) -> Sequence[_Program | _Statements]:
    if not text.strip():
        raise ValueError("tests is empty: write at least one test (docs/rewards.md)")
    try:
        return _read_tests(json.loads(text))
    except json.JSONDecodeError:
        return [_read_test(text)]


def _read_columns(tests: Mapping[str, Any]) -> Iterator[dict[str, Any]]:  # Any: values of JSON
    """Yields a test for each pair in the lists `inputs` and `outputs`, which is the format of the dataset APPS.

    A test calls the function `fn_name`, if `tests` has one. Otherwise, it runs the program with the input as text.
    """
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(
            f"tests is a mapping with the keys {', '.join(map(str, tests))}, but needs the lists inputs and outputs of "
            "the same length"
        )
    for given, expected in zip(inputs, outputs, strict=True):
        if tests.get("fn_name") is None:
            yield {"input": _join(given), "output": _join(expected)}
        else:
            yield {"function": tests["fn_name"], "arguments": given, "output": expected}


def _join(value: Any) -> Any:  # Any: text, or a list of lines
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _read_test(test: object) -> _Program | _Statements:
    match test:
        case str():
            try:
                tree = ast.parse(test)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"test {test[:200]!r} is not Python code ({error}): correct the data") from error
            has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
            is_called = any(isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(tree))
            return _Statements(test, needs_entry_point=has_check and not is_called)
        case {"function": str(name), "arguments": list(arguments), "output": expected} if name.isidentifier():
            values = ", ".join(map(repr, arguments))
            return _Statements(f"assert _to_json({name}({values})) == {expected!r}", entry_point=name)
        case {"input": str(stdin), "output": str(output)}:
            return _Program(stdin, output)
    raise ValueError(
        f"test {str(test)[:200]!r} is unknown: write Python code with assert, {{input, output}} or {{function, "
        "arguments, output}} (docs/rewards.md)"
    )
