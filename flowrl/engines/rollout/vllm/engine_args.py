"""Checks names and simple types of vLLM's engine arguments. Reads them from vLLM's source, because an import takes
seconds.

vLLM itself checks arguments of other types when it starts.
"""

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SOURCE, _CLASS = "engine/arg_utils.py", "EngineArgs"
_SIMPLE: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}


def find_argument_problem(arguments: Mapping[str, Any]) -> str | None:
    """Returns the reason for which vLLM would reject engine arguments, as a predicate that follows the name of the
    setting. Returns None if this check finds no reason, or if vLLM is not installed on this machine.
    """
    if not arguments or (known := _read_annotations()) is None:
        return None
    for name, value in arguments.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            return f"has {name}, which vLLM does not have: {f'use {close[0]}' if close else 'correct the name'}"
        members = known[name].strip("'").split(" | ")
        if not all(member in _SIMPLE for member in members):
            continue
        # A bool is an int for Python, but not for vLLM.
        fits = any(type(value) in _SIMPLE[member] for member in members)
        if not fits:
            return f"has {name} {value!r}, but vLLM needs {' or '.join(members)}: correct the value"
    return None


@cache
def _read_annotations() -> Mapping[str, str] | None:
    """Returns the annotation of each argument by its name. Returns None if vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    module = ast.parse((Path(spec.origin).parent / _SOURCE).read_text(encoding="utf-8"))
    (definition,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == _CLASS)
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    }
