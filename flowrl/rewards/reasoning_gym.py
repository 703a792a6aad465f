"""Reward of the tasks of reasoning-gym: the scorer of the task compares the answer with the row.

Needs the extra `rewards`. `data` settings with `reasoning_gym` generate the rows.
"""

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError as error:
    raise ImportError(
        f"flowrl.rewards.reasoning_gym needs the library reasoning-gym ({error}): pip install 'flowrl[rewards]'"
    ) from error

from flowrl.data.time_limit import TimeLimitError, time_limit

_OPEN, _CLOSE = "<answer>", "</answer>"
_MAX_CHARACTERS = 20_000
"""Largest answer, in characters."""

EVALUATES_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer passes the answer to `eval`, because it may be a Python list."""

EVALUATES_FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer passes the answer to sympy's parser, which uses `eval`."""

# Possessive, because a text of the model could otherwise be split in exponentially many ways.
_FORMULA = re.compile(r"(?:[\s+\-*/^()]|\d++(?:\.\d*+)?+|\.\d++|[A-Za-z]\w*+)*+")
_NAMES = re.compile(r"[A-Za-z]\w*")
_FUNCTIONS = frozenset(
    f"{prefix}{name}{suffix}" for name in ("sin", "cos", "tan") for prefix in ("", "a") for suffix in ("", "h")
) | {"exp", "log", "ln", "sqrt", "pi", "Abs", "sec", "csc", "cot", "erf"}
"""Names that a formula may contain. Every other name must be a single letter, which is a variable."""

_TUPLES = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
"""Task -> entries of its metadata that its scorer compares with tuples, which are lists in JSON."""


def score(
    response: str,
    metadata: Mapping[str, Any],  # Any: values of JSON
    answer: str | None = None,
    task: str | None = None,
    task_options: Mapping[str, Any] | None = None,
    tagged_response: str | None = None,
    *,
    only_tagged: bool = False,
    timeout_s: int = 5,
    **columns: object,
) -> float:
    """Returns the score of the task's own scorer, from 0 to 1.

    Args:
        response: the text. Its answer is the content of the last `<answer>...</answer>`, otherwise the complete text.
        metadata: metadata of the row, as the package generates it.
        answer: reference answer. Tasks with many solutions have none.
        task: name of the task. None: `source_dataset` in the metadata.
        task_options: options of the task with which the row was generated.
        tagged_response: the tags that the prompt opened, then the text with special tokens. None: `response`.
        only_tagged: scores a response without `<answer>...</answer>` as an empty answer.
        timeout_s: seconds after which an answer that is hard to evaluate is scored as an empty answer. The limit needs
            the main thread of a process. In other threads, only `reward.timeout_s` applies.
        columns: ignored.
    Raises:
        ValueError: the installed version of reasoning-gym does not have the task.
    """
    name = task or metadata.get("source_dataset")
    if name not in DATASETS:
        raise ValueError(
            f"the row is from the task {name!r}, which reasoning-gym {reasoning_gym.__version__} does not have: use "
            f"rows of `reasoning_gym`, or another reward"
        )
    values = dict(metadata)
    for key in _TUPLES.get(name, ()):
        values[key] = tuple(tuple(row) for row in values[key])
    entry = {"answer": answer, "metadata": values}
    text = response if tagged_response is None or _CLOSE not in tagged_response else tagged_response
    options = repr(sorted((task_options or {}).items()))
    dataset = _load_dataset(name, options) if task_options else _load_dataset(name)
    try:
        with time_limit(timeout_s):
            return float(dataset.score_answer(_checked(_find_answer(text, only_tagged), name, answer), entry))
    except (TimeLimitError, Exception):  # noqa: BLE001 (some scorers fail for answers of an unexpected form)
        return float(dataset.score_answer("", entry))


def extract_answer(response: str) -> str:
    """Returns the content of the last `<answer>...</answer>`, otherwise all text, for `evaluation.extract_answer`.

    The text has no tags that are special tokens or that the prompt opened, unlike `tagged_response` of `score`.
    """
    return _find_answer(response, only_tagged=False)


@lru_cache
def _load_dataset(name: str, options: str = "[]") -> Any:  # Any: the class of the task
    return reasoning_gym.create_dataset(name, seed=0, size=1, **dict(ast.literal_eval(options)))


def _find_answer(response: str, only_tagged: bool) -> str:
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, end) if end >= 0 else -1
    if start >= 0:
        return response[start + len(_OPEN) : end].strip()
    return "" if only_tagged else response.strip()


def _checked(text: str, task: str, answer: str | None) -> str:
    """Returns the answer, or an empty text if the scorer of the task would execute it as code."""
    if text == answer:
        return text
    if len(text) > _MAX_CHARACTERS:
        return ""
    if task in EVALUATES_LITERALS:
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return ""
    if task in EVALUATES_FORMULAS and not _is_formula(text):
        return ""
    return text


def _is_formula(text: str) -> bool:
    """Returns whether a text has only numbers, operators, single letters and known functions."""
    if not _FORMULA.fullmatch(text):
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in _NAMES.findall(text))
