import json
import threading
import time

import pytest

from flowrl.rewards.code import find_code, score

ADD = "def add(a, b):\n    return a + b\n"
COUNTER = """
class Counter:
    def __init__(self, x):
        self.x = x
    def get(self):
        return self.x
def name(value):
    return type(value).__name__
"""


def fenced(code: str) -> str:
    return f"First, I think.\n```python\n{code}\n```\nDone."


def test_a_program_is_scored_by_its_output() -> None:
    code = "a, b = map(int, input().split())\nprint(a + b)"
    tests = [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "1 2", "output": "4"},
        {"input": "2 2", "output": "4  \n\n"},
    ]
    assert score(fenced(code), tests) == pytest.approx(2 / 3)
    assert score(fenced(code), json.dumps(tests)) == pytest.approx(2 / 3)
    assert score(fenced(code), tests, all_or_nothing=True) == 0.0
    assert score(fenced(code), [tests[0], tests[2]], all_or_nothing=True) == 1.0
    assert score(fenced(code), tests, max_tests=1) == 1.0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(3)", 1.0),
        ("if __name__ == '__main__':\n    print(3)", 1.0),
        ("print(3)\nraise SystemExit", 1.0),
        ("print(3)\nraise SystemExit(1)", 0.0),
        ("print(3)\n1 / 0", 0.0),
        ("print(3); print(3)", 0.0),
        ("import threading\nthreading.Thread(target=lambda: print(3)).start()", 1.0),
        ("import subprocess\nprint(subprocess.check_output(['echo', '3'], text=True))", 1.0),
        ("open('a.txt', 'w').write('3')\nprint(open('a.txt').read())", 1.0),
        ("def f(:", 0.0),
        ("", 0.0),
    ],
)
def test_a_program_runs_as_a_file(code: str, expected: float) -> None:
    assert score(fenced(code), [{"input": "", "output": "3"}]) == expected


@pytest.mark.parametrize(
    ("code", "test", "expected"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, "assert add(1, 2) == 4", 0.0),
        (ADD, "assert add([1], [2]) == [1, 2] and add((1,), (2,)) == (1, 2)", 1.0),
        (ADD, "assert abs(add(0.1, 0.2) - 0.3) < 1e-9", 1.0),
        (ADD, "import math\nassert math.isnan(add(math.inf, -math.inf))", 1.0),
        (ADD, "try:\n    add(1, '')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError", 1.0),
        (ADD, "assert add(b=1, a='') == 1", 0.0),
        ("def f(x):\n    return {1: {x}, 'a': (b'b', 1j)}", "assert f(2) == {1: {2}, 'a': (b'b', 1j)}", 1.0),
        ("def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]", 1.0),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", 1.0),
        (COUNTER, "a = Counter(3)\nassert a.get() == 3 and a.x == 3", 1.0),
        (COUNTER, "assert name(Counter(3)) == 'Counter'", 1.0),
        ("from math import sqrt\ndef f(x):\n    return sqrt(x)", "assert f(4) == 2", 1.0),
        ("LIMIT = 7", "assert LIMIT == 7", 1.0),
        ("LIMIT = 7", "def test():\n    assert LIMIT == 7\ntest()", 1.0),
        ("LIMITS = [7]\nLIMITS.append(LIMITS)\ndef f():\n    return LIMITS[0]", "assert f() == 7", 1.0),
        ("print('noise')\ndef f():\n    print('noise')\n    return 1", "assert f() == 1", 1.0),
        ("def f():\n    return 1", "assert g() == 1", 0.0),
        ("def f():\n    return 10**5000", "assert f() == 10**5000", 1.0),
        ("class F(float):\n    __repr__ = lambda self: 'F'\ndef f():\n    return F(2)", "assert f() == 2", 1.0),
        ("def f(g, x):\n    return g(x)\ndef g(x):\n    return -x", "assert f(g, 1) == -1", 1.0),
        ("def f():\n    yield 1", "x = f()\nassert next(x) == 1 and next(x, 2) == 2", 1.0),
        ("class E(ValueError):\n    pass\ndef f():\n    raise E('e')",
         "try:\n    f()\nexcept ValueError as e:\n    assert str(e) == 'e'\nelse:\n    assert False", 1.0),
        ("def copy(x):\n    return x", "assert copy(1) == 1", 1.0),
        ("def to_json(x):\n    return x + 1", "assert to_json(1) == 2", 1.0),
        ("import collections\ndef f():\n    return collections.Counter('aab')", "assert f() == {'a': 2, 'b': 1}", 1.0),
    ],
)  # fmt: skip
def test_assert_statements_call_functions_of_the_code(code: str, test: str, expected: float) -> None:
    assert score(fenced(code), [test]) == expected


def test_a_function_is_tested_with_arguments_and_an_output() -> None:
    tests = {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}
    assert score(fenced(ADD), tests) == 1.0
    assert score(fenced("def add(a, b):\n    return (a, b)"), {**tests, "outputs": [[1, 2], 3]}) == 0.5
    assert score(fenced(ADD), [{"function": "add", "arguments": [1, 2], "output": 3}]) == 1.0


def test_inputs_and_outputs_may_be_lists_of_lines() -> None:
    tests = {"inputs": ["1\n2", ["1", "2"]], "outputs": ["3", ["3"]]}
    assert score(fenced("print(int(input()) + int(input()))"), tests) == 1.0


def test_a_check_function_receives_the_entry_point() -> None:
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == {}\n"
    assert score(fenced(ADD), test.format(4), "add") == 1.0
    assert score(fenced(ADD), test.format(5), "add") == 0.0


@pytest.mark.parametrize("name", ["sum", "copy", "_add", "check"])
def test_an_entry_point_may_have_any_name(name: str) -> None:
    code = fenced(f"def {name}(a, b):\n    return a + b")
    assert score(code, f"assert {name}(1, 2) == 3", name) == 1.0
    assert score(code, f"assert {name}(1, 2) == 4", name) == 0.0


def test_the_function_of_a_test_is_that_of_the_code() -> None:
    test = {"function": "sum", "arguments": [[1, 2]], "output": 3}
    assert score(fenced("def f(x):\n    return 3"), [test]) == 0.0
    assert score(fenced("def sum(x):\n    return 3"), [test]) == 1.0


@pytest.mark.parametrize("entry_point", [None, ""])
def test_a_check_function_that_nothing_calls_is_rejected(entry_point: str | None) -> None:
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    with pytest.raises(ValueError, match="entry_point"):
        score(fenced(ADD), test, entry_point)
    assert score(fenced(ADD), f"{test}check(add)") == 1.0


def test_the_last_python_block_is_the_code() -> None:
    assert find_code("```\na\n```\n```python\nb\n```\n```text\nc\n```") == "b\n"
    assert find_code("```py\na\n``` and `b`") is None
    assert find_code("no code") is None
    assert find_code("```python\nunclosed") is None
    assert find_code("```python\n```python\na\n``` \n```") == "```python\na\n"


@pytest.mark.parametrize("text", ["```\n", "```python\n", "```text", "```" + " " * 199_000 + "x", " ", "\n", "1"])
def test_the_time_of_a_search_is_linear(text: str) -> None:
    response = text * (200_000 // len(text))
    start_s = time.process_time()
    find_code(response)
    assert time.process_time() - start_s < 2


def test_a_python_block_counts_before_a_block_without_a_language() -> None:
    assert find_code("```python\nprint(3)\n```\nOutput:\n```\n3\n```") == "print(3)\n"
    assert find_code("```\na\n```\n```\nb\n```") == "b\n"


@pytest.mark.parametrize(
    "text",
    [
        "  ```Python\n  if a:\n      b\n  ```",
        "1. Code:\n   ```python\n   if a:\n       b\n   ```",
        "1. ```python\n   if a:\n       b\n   ```",
        "- ```python\n  if a:\n      b\n  ```",
        "\t```python\n\tif a:\n\t    b\n\t```",
        "  ```python\nif a:\n    b\n  ```",
    ],
)
def test_a_block_in_a_list_loses_its_common_indentation(text: str) -> None:
    assert find_code(text) == "if a:\n    b\n"


INVALID = (
    None, [], "", "def f(:", {}, {"inputs": ["1"], "outputs": []}, [3], [{"input": "1"}],
    [{"function": "a b", "arguments": [], "output": 1}],
)  # fmt: skip


@pytest.mark.parametrize("tests", INVALID)
def test_unknown_formats_are_rejected(tests: object) -> None:
    with pytest.raises(ValueError, match="test"):
        score(fenced(ADD), tests)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_all_tests_share_a_time_limit() -> None:
    code = fenced("import time\nseconds = int(input())\ntime.sleep(seconds)\nprint(seconds)")
    tests = [{"input": str(x), "output": str(x)} for x in (0, 1000, *range(198))]
    assert score(code, tests, timeout_s=100.0, total_timeout_s=10.0) == 1 / 200


def test_the_function_works_outside_of_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score(fenced(ADD), ["assert add(1, 2) == 3"])))
    thread.start()
    thread.join()
    assert scores == [1.0]
