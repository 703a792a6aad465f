"""The tree of settings of a config class: keys, docstrings, groups of settings, and unions of groups."""

import ast
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from flowrl.config.base import Config, Member, check_import_name, check_name
from flowrl.config.source import Key


def config_classes(annotation: Any) -> tuple[type[Config], ...]:  # Any: a type of a field
    """Returns the config classes in a field's type, including those inside `X | None`, `Mapping[str, X]` and
    `Annotated`.
    """
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return tuple(dict.fromkeys(annotation.members().values())) if issubclass(annotation, Member) else (annotation,)
    return tuple(cls for part in get_args(annotation) for cls in config_classes(part))


def fields_of(classes: Sequence[type[Config]]) -> dict[str, FieldInfo]:
    """Returns the fields of all classes by name."""
    return {name: field for cls in classes for name, field in cls.model_fields.items()}


def meaning_of(info: FieldInfo) -> str:
    """Returns the docstring of a setting on one line, or an empty text without a docstring."""
    if info.description is None:
        _add_docstrings(Config)
    return " ".join((info.description or "").split())


def _add_docstrings(cls: type[Config]) -> None:
    """Adds the missing descriptions of all fields of a class and its subclasses.

    A field that a subclass redefines without a docstring has the docstring of the base class. Pydantic could read the
    docstrings when it creates the classes, but parsing the source would take a third of the import of all settings.
    """
    bases = [base for base in cls.__mro__ if issubclass(base, Config)]
    for name, info in cls.model_fields.items():
        if info.description is None:
            docstrings = (_read_docstrings(base.__module__).get((base.__qualname__, name)) for base in bases)
            info.description = next((docstring for docstring in docstrings if docstring), "")
    for subclass in cls.__subclasses__():
        _add_docstrings(subclass)


@cache
def _read_docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """Returns (class, attribute) -> docstring, for the annotated attributes of all classes in a module."""
    try:
        return dict(_find_docstrings(ast.parse(inspect.getsource(sys.modules[module])), ""))
    except (KeyError, OSError, TypeError):  # a module without source, of a terminal or removed
        return {}


def _find_docstrings(node: ast.AST, scope: str) -> Iterator[tuple[tuple[str, str], str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield from _find_docstrings(child, f"{scope}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _find_docstrings(child, f"{scope}{child.name}.")
            for statements in pairwise(child.body):
                match statements:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                        yield (scope + child.name, name), docstring
        else:
            yield from _find_docstrings(child, scope)


def may_name_code(field: FieldInfo) -> bool:
    """Returns whether a field accepts the name of a function or a class of the user, `module:name`."""
    return _may_name_code(field.annotation, field.metadata)


def _may_name_code(annotation: Any, metadata: Sequence[object]) -> bool:  # Any: a type of a field
    checks = (entry.func for entry in metadata if isinstance(entry, AfterValidator))
    if any((check.func if isinstance(check, partial) else check) in _NAME_CHECKS for check in checks):
        return True
    further = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return any(_may_name_code(part, further) for part in parts)


_NAME_CHECKS = (check_import_name, check_name)
"""Validators of settings that accept `module:name`."""


def select_members(classes: Sequence[type[Config]]) -> list[type[Member]]:
    """Returns the classes that are members of a discriminated union."""
    return [cls for cls in classes if issubclass(cls, Member)]


def names_of(members: Sequence[type[Member]]) -> list[str]:
    """Returns the names that select one of the members."""
    return [name for member in members for name in member.names()]


def accepted_fields(
    cls: type[Config], omitted: Collection[str] = ()
) -> Iterator[tuple[str, FieldInfo, tuple[str, ...]]]:
    """Yields each accepted field of a class: its name, its information, and the unsupported settings within it.

    `omitted` contains further settings of `cls` that an enclosing group does not accept.
    """
    omitted = {*omitted, *cls.unsupported_settings()}
    for name, field in cls.model_fields.items():
        if name not in omitted:
            inner = (path.partition(".")[2] for path in omitted if path.startswith(f"{name}."))
            yield name, field, tuple(sorted(inner))


def setting_paths(cls: type[Config], prefix: str = "", omitted: Collection[str] = ()) -> Iterator[str]:
    """Yields the dotted key of every accepted setting and every accepted group below `cls`."""
    for name, field, inner in accepted_fields(cls, omitted):
        yield prefix + name
        groups = config_classes(field.annotation)
        for path in dict.fromkeys(p for group in groups for p in setting_paths(group, omitted=inner)):
            yield f"{prefix}{name}.{path}"


def find_unions(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, list[type[Member]]]]:
    """Yields the dotted key and the members of every union below `cls`."""
    for name, field in cls.model_fields.items():
        classes = config_classes(field.annotation)
        if members := select_members(classes):
            yield prefix + name, members
        for group in classes:
            yield from find_unions(group, f"{prefix}{name}.")


def find_disabled_settings(config: Config, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Yields the key of the group and a message, for every setting that another setting disables.

    `key` is the key of `config`.
    """
    for message in config.find_unused(is_error=False):
        yield key, message
    for name, value in config:
        entries = enumerate(value) if isinstance(value, tuple) else value.items() if isinstance(value, Mapping) else ()
        for path, group in [((name,), value), *(((name, entry), group) for entry, group in entries)]:
            if isinstance(group, Config):
                yield from find_disabled_settings(group, (*key, *path))


_UNKNOWN = object()


def walk(loc: Key, cls: type[Config], values: object = _UNKNOWN) -> tuple[Key, tuple[type[Config], ...]]:
    """Returns the key of a pydantic error location, and the config classes at its end. A union has several classes.

    The key is the location without the tags of unions. If `values` has the settings of the file, the labels that
    pydantic adds for the types of a union without tags are also removed.
    """
    key: list[str | int] = []
    classes: tuple[type[Config], ...] = (cls,)
    is_name = False
    for part in loc:
        if is_name:  # A name in a mapping may equal a setting of its group.
            key.append(part)
            values, is_name = values if values is _UNKNOWN else _child(values, part), False
            continue
        tagged = tuple(member for member in select_members(classes) if part in member.names())
        if tagged and len(classes) > 1:
            classes = tagged
            continue
        field = fields_of(classes).get(str(part))
        if field is None and values is not _UNKNOWN and not _contains(values, part):
            continue
        key.append(part)
        values = values if values is _UNKNOWN else _child(values, part)
        origin = None if field is None else get_origin(field.annotation)
        is_name = isinstance(origin, type) and issubclass(origin, Mapping)
        classes = config_classes(field.annotation) if field else classes  # Keys of mappings and indices have none.
    return tuple(key), classes


def _contains(value: object, part: str | int) -> bool:
    return part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)


def _child(value: object, part: str | int) -> object:
    if isinstance(value, Mapping):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
