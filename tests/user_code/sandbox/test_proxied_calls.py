"""Code that tries to pass tests without solving the task: to increase a number by one."""

import socket
import textwrap

import pytest

from flowrl.rewards.code import score
from flowrl.user_code.sandbox.launch import Sandbox

STYLES = {
    "tolerance": "assert abs(f(1) - 2) < 1e-6",
    "set": "assert set([f(1)]) == set([2])",
    "sorted": "assert sorted([f(1), 0]) == [0, 2]",
    "len": "assert len(range(f(1))) == 2",
    "all": "assert all([f(x) == x + 1 for x in (1, 5)])",
    "round": "assert round(f(1), 2) == 2",
    "equality": "assert f(1) == 2",
    "map": "assert all(map(lambda x: f(x) == x + 1, (1, 5)))",
    "loop": "for value, expected in zip(map(f, (1, 5)), (2, 6)):\n    assert value == expected",
    "membership": "assert f(1) in (2,) and 2 in {f(1)}",
    "type": "assert isinstance(f(1), int) and type(f(1)) is int and str(f(1)) == '2'",
    "import": "import math\nassert math.isclose(f(1), 2)",
    "computed": "def expected(x):\n    return x + 1\nassert max(f(1), 1) == expected(1)",
}
"""Tests that the right function passes. The first seven are those of common datasets."""

IN_PROCESS = """
import sys
frame = sys._getframe()
while "_respond" not in frame.f_globals:
    frame = frame.f_back
protocol = frame.f_globals
encode, respond = protocol["_encode"], protocol["_respond"]
"""
"""Gives the code access to the functions that answer the tests in its process."""

FORGED_BUILTINS = """
import builtins
seen = []
results = {"abs": 0, "sorted": [0, 2], "len": 2, "range": [1, 2], "map": [True], "max": 2, "str": "2"}
def forge(name):
    def call(*values, **options):
        seen.extend(values)
        return results.get(name, True)
    return call
forged = {name: forge(name) for name in dir(builtins)}
def f(x, builtins=builtins):
    numbers = [value for value in seen if builtins.type(value) is builtins.int]
    return numbers[-1] if numbers else 0
"""
"""Functions that pass tests and collect their arguments in place of the builtins, and f, which returns the last one."""

ATTACKS = {
    "exit": "import sys\nsys.exit(0)",
    "exit without cleanup": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef f(x):\n    os._exit(0)",
    "signals": "import os, signal\ndef f(x):\n    os.kill(-1, signal.SIGKILL)",
    # Values.
    "equal object": "class E:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return E()",
    "equal number, text and list": """
def make_class(kind):
    return type("E", (kind,), {"__eq__": lambda self, other: True, "__hash__": None})
results = [make_class(int)(3), make_class(float)(3), make_class(str)("a"), make_class(list)(), make_class(dict)()]
def f(x):
    results.append(results.pop(0))
    return results[-1]
""",
    "object with the methods of a number": """
class E:
    __class__ = property(lambda self: int)
    __hash__ = __len__ = lambda self: 2
    __index__ = __int__ = lambda self: 7
    __float__ = lambda self: 7.0
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = lambda self, *other: True
    __sub__ = __rsub__ = __abs__ = __round__ = __neg__ = lambda self, *other: 0
    __iter__ = lambda self: iter([2])
    __str__ = __repr__ = lambda self: '2'
    __format__ = lambda self, text: '2'
    __getattr__ = lambda self, name: lambda *values, **options: True
    __instancecheck__ = __subclasscheck__ = lambda self, other: True
def f(x):
    return E()
""",
    "deep value": "def f(x):\n    value = []\n    for _ in range(100_000):\n        value = [value]\n    return value",
    "endless value": "def f(x):\n    value = []\n    value.append(value)\n    return value",
    "huge value": "def f(x):\n    return 'x' * 10_000_000",
    "huge number": "def f(x):\n    return 1 << 40_000_000",
    "many values": "def f(x):\n    return [10**15] * 500_000",
    # Errors.
    "SystemExit in the function": "def f(x):\n    raise SystemExit(0)",
    "end of a loop": "def f(x):\n    raise StopIteration",
    "error without text": "class E(Exception):\n    __str__ = lambda self: 1 / 0\ndef f(x):\n    raise E",
    "own AssertionError": """
import builtins
builtins.AssertionError = AssertionError = Warning
def f(x):
    raise AssertionError
""",
    "class with the name of an error": """
class SystemExit(Exception):
    pass
SystemExit.__module__ = "builtins"
def f(x):
    raise SystemExit(0)
""",
    # Names.
    "replaced builtins": "import builtins\nbuiltins.abs = builtins.len = lambda *a: True\ndef f(x):\n    return 0",
    "replaced exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndef f(x):\n    return 0",
    "functions with the names of builtins": FORGED_BUILTINS + "globals().update(forged, f=f)",
    "variable __builtins__": FORGED_BUILTINS + "__builtins__ = forged",
    "forged names": FORGED_BUILTINS + IN_PROCESS + """
forged |= {"__builtins__": dict(forged), "__name__": "__main__", "_to_json": forge(""), "check": forge("")}
def forge_response(request, names, objects):
    return respond(request, names | forged, objects)
protocol["_respond"] = forge_response
""",
    "names of modules": r"""
import sys
class Module:
    isclose = staticmethod(lambda *values: True)
globals().update(dict.fromkeys(sys.stdlib_module_names, Module()), np=Module)
def f(x):
    return 0
""",
    "names that are no text": IN_PROCESS + """
protocol["_respond"] = lambda request, names, objects: encode([(1, True), (None, True), (protocol, True)], objects)
""",
    # The connection.
    "response before the request": r"""
import os
def f(x):
    for number in range(3, 64):
        try:
            os.write(number, b'{"value": true, "arguments": [{"object": 1}]}\n' * 9)
        except OSError:
            pass
""",
    "response without an end": r"""
import os
def f(x):
    for number in range(3, 64):
        try:
            os.write(number, b'[' * 9_000_000)
        except OSError:
            pass
""",
    "values of unknown types": IN_PROCESS + r"""
results = [
    float("inf"), {"eval": "2"}, {"object": "f"}, {"object": [2]}, {"int": 2}, {"float": 2, "int": "2"}, {},
    {"list": {"set": []}}, {"dict": [[1]]}, {"bytes": "2"}, {"Exception": "2"}, {"__class__": []},
]
def forge_response(request, names, objects):
    if request["op"] != "call":
        return respond(request, names, objects)
    results.append(results.pop(0))
    return {"value": results[-1], "arguments": request["arguments"]}
protocol["_respond"] = forge_response
def f(x):
    return 0
""",
    "forged errors": IN_PROCESS + """
import json
errors = ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "print", 1, None]
class Json:
    loads = json.loads
    def dumps(response):
        errors.append(errors.pop(0))
        return json.dumps({"error": errors[-1], "message": 0} if "error" in response else response)
protocol["json"] = Json
def f(x):
    raise ValueError
""",
    "changed arguments": IN_PROCESS + """
def forge_response(request, names, objects):
    response = respond(request, names, objects)
    return response if "arguments" not in response else response | {"arguments": [{"list": [2]}] * 9}
protocol["_respond"] = forge_response
def f(x):
    return 0
""",
    # The expected values.
    "text of the tests in frames": r"""
import re, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if found := re.search(r"f.1. == (\d+)", str(value)):
                return int(found[1])
        frame = frame.f_back
""",
    "text of the tests in memory": r"""
import gc, re
def f(x):
    for value in gc.get_objects():
        if isinstance(value, (dict, list)) and (found := re.search(r"f.1. == (\d+)", str(value))):
            return int(found[1])
""",
    "text of the tests in files": r"""
import glob, re
def f(x):
    for path in (*glob.glob("/tmp/**", recursive=True), *glob.glob("/proc/*/cmdline"), *glob.glob("/proc/*/fd/*")):
        try:
            if found := re.search(rb"f.1. == (\d+)", open(path, "rb").read(1 << 20)):
                return int(found[1])
        except OSError:
            pass
""",
}  # fmt: skip

SOLUTION = "def f(x):\n    return x + 1\nif __name__ == '__main__':\n    print(f(int(input())))"


def write_tests(end: str) -> str:
    """Returns one program that runs the tests of all styles, collects those that pass, and executes `end`."""
    parts = [
        f"try:\n{textwrap.indent(test, '    ')}\n    passed += [{style!r}]\nexcept:\n    pass"
        for style, test in STYLES.items()
    ]
    return "\n".join(["passed = []", *parts, end])


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_passes_no_style_of_tests(attack: str) -> None:
    response = f"```python\n{ATTACKS[attack]}\n```"
    tests = [write_tests("assert passed or f(1) == 2")]  # the last call could end the program with code 0
    assert [score(response, tests), score(response, tests, "f")] == [0.0, 0.0]


@pytest.mark.parametrize("entry_point", [None, "f"])
def test_a_solution_passes_all_styles_of_tests(entry_point: str | None) -> None:
    test = write_tests(f"assert passed == {list(STYLES)}")
    assert score(f"```python\n{SOLUTION}\n```", [test], entry_point) == 1.0


@pytest.mark.parametrize("name", ["math", "np"])
def test_the_code_cannot_replace_a_function_of_a_module_that_only_the_code_imports(name: str) -> None:
    attack = f"class {name}:\n    isclose = lambda *values: True\ndef f(x):\n    return 0"
    assert score(f"```python\n{attack}\n```", [f"assert {name}.isclose(f(1), 2)"]) == 0.0


def test_a_test_may_use_a_module_that_only_the_code_imports() -> None:
    assert score(f"```python\nimport math\n{SOLUTION}\n```", ["assert math.isclose(f(1), 2)"]) == 1.0


def test_the_code_sees_only_the_arguments_of_its_calls() -> None:
    code = IN_PROCESS + textwrap.dedent("""
        def record_request(request, names, objects):
            print(request, flush=True)
            return respond(request, names, objects)
        protocol["_respond"] = record_request
        def f(x):
            return 71
    """)
    test = "def check(candidate):\n    assert candidate(61) in (71, 72) and sorted([73]) != candidate(62) != 74"
    code_end, test_end = socket.socketpair()
    with (
        Sandbox("serve", code, connection=code_end) as tested,
        Sandbox("check", test, connection=test_end, entry_point="f") as checker,
    ):
        assert checker.wait() == 0
        requests = tested.read_output().splitlines()
    assert [request for request in requests if "call" in request] == [
        str({"op": "call", "target": "f", "arguments": [x], "options": {}}) for x in (61, 62)
    ]
    assert not [request for request in requests if "7" in request]
