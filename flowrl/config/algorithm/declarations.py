"""Reads the declarations of the functions of flowrl.algorithms without importing them, because they import torch.

A function is declared by its decorator, such as `@policy_losses.register("ppo")`. Its parameters before `*` are inputs:
names of columns. Its keyword-only parameters are settings, with their types, defaults and the descriptions in the
section `Args` of the docstring. The decorator may name further functions of the same file: `prepare` computes inputs,
and `checks` raise ValueError for settings that contradict each other or the run.

tests/algorithms/test_declarations.py compares the declarations with the imported functions.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from flowrl.config.algorithm import setting_types

FOLDER = Path(__file__).parents[2] / "algorithms"

REQUIRED = object()
"""Default of a setting without a default."""


@dataclass(frozen=True)
class Setting:
    """A keyword-only parameter."""

    annotation: Any
    """Type, as of a pydantic field."""
    default: Any
    description: str


@dataclass(frozen=True)
class Declaration:
    """A function that settings select by its name."""

    name: str
    module: str
    function: str
    meaning: str
    """First paragraph of the docstring, without `Returns`."""
    inputs: Mapping[str, bool]
    """Input -> whether it is required. With the inputs of functions that prepare inputs, and without their results."""
    settings: Mapping[str, Setting]
    """Settings of the function, and of the functions that prepare its inputs."""
    checks: tuple[Callable[..., None], ...]
    """Functions of settings, and of facts of the run such as `samples_per_prompt`. They raise ValueError."""
    options: Mapping[str, Any]
    """Other arguments of the decorator."""
    has_prepared: bool
    """Whether functions prepare inputs."""


@cache
def declarations(registry: str) -> Mapping[str, Declaration]:
    """Returns name -> declaration of the functions of a registry such as `policy_losses`, in the order of the files."""
    modules = (module for module in _modules() if registry in module.text)
    return {declaration.name: declaration for module in modules for declaration in module.declarations(registry)}


@cache
def _modules() -> tuple["_Module", ...]:
    paths = sorted(FOLDER.rglob("*.py"))
    return tuple(module for path in paths if ".register(" in (module := _read_module(path)).text)


@cache
def _read_module(path: Path) -> "_Module":
    return _Module(path, path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class _Module:
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def declarations(self, registry: str) -> Iterator[Declaration]:
        for function in self.functions.values():
            for decorator in function.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="register"), args=[names]) if (
                        name == registry
                    ):
                        yield self._declare(function, ast.literal_eval(names), decorator.keywords)

    def _declare(self, function: ast.FunctionDef, name: str, keywords: list[ast.keyword]) -> Declaration:
        given = {keyword.arg or "": keyword.value for keyword in keywords}
        prepare, checks = given.pop("prepare", None), given.pop("checks", None)
        entries = zip(prepare.keys, prepare.values, strict=True) if isinstance(prepare, ast.Dict) else ()
        prepared = {ast.literal_eval(key): self._function(value) for key, value in entries if key is not None}
        settings = {name: setting for each in (*prepared.values(), function) for name, setting in self._settings(each)}
        bound, defaults = (ast.literal_eval(given.pop(key, ast.Dict([], []))) for key in ("bind", "defaults"))
        settings = {
            key: replace(setting, default=defaults.get(key, setting.default))
            for key, setting in settings.items()
            if key not in bound
        }
        inputs = {name: needed for each in (function, *prepared.values()) for name, needed in _inputs(each)}
        return Declaration(
            name,
            ".".join(("flowrl", FOLDER.name, *self.path.relative_to(FOLDER).with_suffix("").parts)),
            function.name,
            _meaning(function),
            {name: needed for name, needed in inputs.items() if name not in (*prepared, *settings)},
            settings,
            tuple(self._compile(each) for each in checks.elts) if isinstance(checks, ast.Tuple) else (),
            {key: ast.literal_eval(value) for key, value in given.items()},
            bool(prepared),
        )

    def _function(self, name: ast.expr) -> ast.FunctionDef:
        assert isinstance(name, ast.Name), f"{self.path}: {ast.unparse(name)} must be the name of a function"
        return self.functions[name.id]

    def _settings(self, function: ast.FunctionDef) -> Iterator[tuple[str, Setting]]:
        for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            assert parameter.annotation is not None, f"{self.path}: {parameter.arg} of {function.name} needs a type"
            annotation = self._evaluate(parameter.annotation)
            if not setting_types.is_constant(annotation):
                value = REQUIRED if default is None else ast.literal_eval(default)
                yield parameter.arg, Setting(annotation, value, _describe(function, parameter.arg))

    def _evaluate(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), str(self.path), "eval"), {}, _Names(self))

    def find(self, name: str) -> Any:
        """Returns the value of a name in an annotation: a type of settings, or an alias in a file of algorithms."""
        for namespace in (setting_types, builtins):
            if hasattr(namespace, name):
                return getattr(namespace, name)
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return self._evaluate(value)
                case ast.ImportFrom(module=str(module), names=names) if any(alias.name == name for alias in names):
                    path = FOLDER.joinpath(*module.split(".")[2:]).with_suffix(".py")
                    return _read_module(path).find(name)
        raise NameError(f"{self.path}: {name} is not a type of settings")

    def _compile(self, name: ast.expr) -> Callable[..., None]:
        """Returns a function of this file that uses nothing but its parameters."""
        source = ast.parse(ast.unparse(self._function(name))).body[0]
        assert isinstance(source, ast.FunctionDef)
        source.returns = None
        for parameter in (*source.args.args, *source.args.kwonlyargs):
            parameter.annotation = None
        names: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(ast.Module([source], [])), str(self.path), "exec"), names)
        return names[source.name]


class _Names(dict[str, Any]):
    def __init__(self, module: _Module) -> None:
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module.find(name)


def _inputs(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    parameters = function.args.args
    num_required = len(parameters) - len(function.args.defaults)
    yield from ((parameter.arg, index < num_required) for index, parameter in enumerate(parameters))


def _meaning(function: ast.FunctionDef) -> str:
    text = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
    text = re.sub(r"^Returns (an? |the )?", "", text)
    return text[:1].upper() + text[1:]


def _describe(function: ast.FunctionDef, name: str) -> str:
    """Returns the entry of a parameter in the section `Args`, or that of the function that the section refers to."""
    docstring = f"{ast.get_docstring(function)}\n"
    section = re.search(r"^Args( \(`(\w+)` describes [^\n]*| \([^\n]*)?:\n((?:    .*\n|\n)*)", docstring, re.M)
    assert section is not None, f"the docstring of {function.name} has no Args"
    for names, text in re.findall(r"^(\w+(?:, \w+)*): ((?:.*\n?)(?:^ +.*\n?)*)", textwrap.dedent(section[3]), re.M):
        if name in names.split(", "):
            return " ".join(text.split())
    others = (module.functions.get(section[2]) for module in _modules())
    described = next((other for other in others if other is not None), None)
    assert described is not None, f"the docstring of {function.name} does not describe {name}"
    return _describe(described, name)
