"""Describes all settings of config classes: type, default and meaning. Renders docs/config.md."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from flowrl.config.base import CUSTOM, Config, check_import_name, check_name
from flowrl.config.placement import Placement
from flowrl.config.setting_tree import (
    accepted_fields,
    config_classes,
    fields_of,
    meaning_of,
    names_of,
    select_members,
)

Classes = tuple[type[Config], ...]
"""The classes of a group of settings: one class, or all members of a union."""

_NAMES = {int: "integer", float: "number", str: "text", Path: "path", NoneType: "`null`"}
_LIMITS = ((Gt, "gt", "above"), (Ge, "ge", "at least"), (Lt, "lt", "below"), (Le, "le", "at most"))


def type_of(info: FieldInfo) -> str:
    """Returns the allowed values of a setting in words, with names in backticks."""
    *first, last = dict.fromkeys(_allowed_types(info.annotation, info.metadata))
    return f"{', '.join(first)} or {last}" if first else last


def _allowed_types(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:  # Any: a type, and its annotations
    origin, arguments = get_origin(annotation), get_args(annotation)
    if names := [name for entry in metadata for name in _names_in(entry)]:
        return names
    if origin is Annotated:
        return _allowed_types(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return [f"`{yaml_text(value)}`" for value in arguments]
    if origin in (Union, UnionType):
        parts = [text for part in arguments for text in _allowed_types(part, () if part is NoneType else metadata)]
        return sorted(parts, key="`null`".__eq__)
    if origin is not None:
        return [_collection(origin, arguments, has_groups=bool(config_classes(annotation)))]
    if annotation is bool:
        return ["`true`", "`false`"]
    return ["group" if config_classes(annotation) else f"{_NAMES[annotation]}{_limits(metadata)}"]


def _names_in(entry: object) -> list[str]:
    """Returns the names that a validator in the metadata of a type allows."""
    if isinstance(entry, AfterValidator) and entry.func is check_import_name:
        return ["`module:name`"]
    if isinstance(entry, AfterValidator) and isinstance(entry.func, partial) and entry.func.func is check_name:
        settings = entry.func.keywords
        return [f"`{name}`" for name in (*settings["names"], settings.get("custom", CUSTOM))]
    return []


def _collection(origin: type, arguments: Sequence[Any], *, has_groups: bool) -> str:  # Any: types
    if issubclass(origin, Mapping):
        values = _allowed_types(arguments[1]) if has_groups else []
        return f"mapping of {' or '.join(_plural(text) for text in values)}" if values else "mapping"
    if has_groups:
        return "list of groups"
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)} {_allowed_types(arguments[0])[0]}s"
    return f"list of {' or '.join(_plural(text) for text in _allowed_types(arguments[0]))}"


def _limits(metadata: Sequence[object]) -> str:
    limits = [
        f"{sign} {getattr(entry, name):g}"
        for entry in metadata
        for kind, name, sign in _LIMITS
        if isinstance(entry, kind)
    ]
    return f" {', '.join(limits)}" if limits else ""


def _plural(text: str) -> str:
    head, space, rest = text.partition(" ")
    return f"{head}s{space}{rest}" if head in ("integer", "number", "path", "list", "group") else text


def is_collection(info: FieldInfo) -> bool:
    """Returns whether a setting is a list or mapping, possibly of groups."""
    return any(text.startswith(("list", "mapping")) for text in _allowed_types(info.annotation, info.metadata))


def default_of(info: FieldInfo) -> Any:  # Any: the value of any setting
    """Returns the default of a setting as plain YAML values. A group has only the settings that differ from its own
    defaults.
    """
    value = info.get_default(call_default_factory=True)
    if not isinstance(value, Config):
        return list(value) if isinstance(value, tuple) else value
    settings = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, Placement):
        settings["roles"] = {name: value.role(name).pool for name in value.roles}
    members = select_members((type(value),))
    return {members[0].KEY: members[0].names()[0], **settings} if members else settings


def yaml_text(value: object) -> str:
    """Returns a plain value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else f"{value:.1f}"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()


@dataclass(frozen=True)
class UnionSetting:
    """A setting of some members of a union."""

    name: str
    info: FieldInfo
    members: tuple[str, ...]
    """Names that select the members."""


def union_settings(classes: Classes) -> list[UnionSetting]:
    """Returns the settings of a union's members, except the one that selects a member. Merges equal settings."""
    members = select_members(classes)
    merged: dict[tuple[str, ...], tuple[str, FieldInfo, list[str]]] = {}
    for member in members:
        for name, info in member.model_fields.items():
            if name != member.KEY:
                identity = (name, type_of(info), meaning_of(info), str(info.is_required() or default_of(info)))
                merged.setdefault(identity, (name, info, []))[2].extend(member.names())
    settings = [UnionSetting(name, info, tuple(names)) for name, info, names in merged.values()]
    return sorted(settings, key=lambda setting: -len(setting.members))


@dataclass
class _Section:
    """A section of the page: config classes, and the keys under which the recipes use them."""

    classes: Classes
    keys: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Key -> names of the recipes."""
    omitted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> settings of the section that the group with this key does not accept."""
    recipes: str = ""
    """Names of the recipes, if the section of other recipes has the same title."""

    @property
    def title(self) -> str:
        first, *others = self.keys
        names = {key.removesuffix(".NAME").rpartition(".")[2] for key in self.keys}
        if len(names) > 1:
            return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.classes[0].__name__).lower()
        return first.removesuffix(".NAME").rpartition(".")[2] if others else first

    @property
    def heading(self) -> str:
        return f"`{self.title}`{f' ({self.recipes})' if self.recipes else ''}"

    @property
    def link(self) -> str:
        anchor = re.sub(r"[^\w -]", "", self.heading.lower()).replace(" ", "-")
        return f"[{self.title}](#{anchor})"


def render_reference(recipes: Mapping[str, type[Config]], command: str) -> str:
    """Returns a Markdown page with all settings of the recipes. `command` is the command that writes the page."""
    sections: dict[Classes, _Section] = {}
    for recipe, cls in recipes.items():
        for key, classes, omitted in _groups(cls):
            section = sections.setdefault(classes, _Section(classes))
            section.keys[key].add(recipe)
            section.omitted |= {key: omitted} if omitted else {}
    num_sections = Counter(section.title for section in sections.values())
    for section in sections.values():
        if num_sections[section.title] > 1:
            used_by = set[str]().union(*section.keys.values())
            section.recipes = ", ".join(recipe for recipe in recipes if recipe in used_by)
    lines = [
        *_HEADER.format(command=command).splitlines(),
        "",
        "| recipe | config class | description |",
        "|---|---|---|",
        *(f"| `{name}` | `{cls.__module__}:{cls.__qualname__}` | {describe(cls)} |" for name, cls in recipes.items()),
        "",
        "## Top-level settings",
        "",
        *_top_level(recipes, sections),
    ]
    for section in sorted(sections.values(), key=lambda section: section.title):
        lines += ["", f"## {section.heading}", "", *_render_section(section, sections, recipes)]
    return "\n".join(lines) + "\n"


_HEADER = """# Settings

This page lists all settings of the recipes. It is generated from the config classes by the command
`{command}`.

A setting is a key of the YAML file of a run, or an argument such as `actor.optimizer.lr=1e-5`. A group is a mapping of
settings. Each group has a section below. A top-level group can also be the path of a YAML file with its settings, such
as `placement: layouts/mine.yaml`. `flowrl config RECIPE` prints a YAML file with all settings of a recipe.

A setting that cannot have an effect is rejected, such as `reward.engine` with a reward function. For a setting that
another setting disables, such as `checkpoint.keep_last` with `checkpoint.every: 0`, the run logs a warning. Both rules
apply only to values that differ from the default."""


def _groups(
    cls: type[Config], prefix: str = "", omitted: Sequence[str] = ()
) -> Iterator[tuple[str, Classes, tuple[str, ...]]]:
    """Yields key, classes and omitted settings of every group below `cls`, except groups inside themselves.

    `omitted` contains the settings of `cls` that an enclosing group does not accept.
    """
    for name, info, inner in accepted_fields(cls, omitted):
        if classes := config_classes(info.annotation):
            key = f"{prefix}{name}{'.NAME' if 'mapping' in type_of(info) else ''}"
            yield key, classes, tuple(setting for setting in fields_of(classes) if setting in inner)
            for group in classes:
                yield from _groups(group, f"{key}.", inner)


def _top_level(recipes: Mapping[str, type[Config]], sections: Mapping[Classes, _Section]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for recipe, cls in recipes.items():
        for name, info, _ in accepted_fields(cls):
            rows.setdefault(_row(name, info, sections), []).append(recipe)
    is_general = {row: len(names) == len(recipes) for row, names in rows.items()}
    ordered = sorted(rows, key=lambda row: not is_general[row])
    return [
        "| key | type | default | meaning | recipes |",
        "|---|---|---|---|---|",
        *(f"{row} {'all' if is_general[row] else ', '.join(rows[row])} |" for row in ordered),
    ]


def _row(name: str, info: FieldInfo, sections: Mapping[Classes, _Section]) -> str:
    classes = config_classes(info.annotation)
    allowed = type_of(info)
    if classes:
        link, is_mapping = sections[classes].link, allowed.startswith("mapping of groups")
        allowed = allowed.replace(
            "groups" if is_mapping else "group", f"names to {link}" if is_mapping else f"{link} group", 1
        )
    if info.is_required():
        default = "**required**"
    else:
        value = default_of(info)
        is_group = value == {} and classes and not allowed.startswith("mapping of")
        default = "its defaults" if is_group else f"`{yaml_text(value)}`"
    cells = [f"`{name}`", allowed, default, meaning_of(info)]
    return _table_row(*cells)


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _render_section(
    section: _Section, sections: Mapping[Classes, _Section], recipes: Mapping[str, type[Config]]
) -> list[str]:
    everywhere = set(recipes)
    keys = [
        f"`{key}`" + ("" if names == everywhere else f" ({', '.join(r for r in recipes if r in names)})")
        for key, names in section.keys.items()
    ]
    members = select_members(section.classes)
    if not members:
        fields = fields_of(section.classes).items()
        table = [_row(name, info, sections) for name, info in fields]
        text = [*textwrap.wrap(describe(section.classes[0]), 120), ""]
        omitted = "".join(f" `{key}` does not accept {_code(names)}." for key, names in section.omitted.items())
        return [
            *textwrap.wrap(f"Keys: {', '.join(keys)}.{omitted}", 120),
            "",
            *text,
            "| key | type | default | meaning |",
            "|---|---|---|---|",
            *table,
        ]
    key = members[0].KEY
    kinds = [_table_row(_code(member.names()), describe(member)) for member in members]
    count = len(names_of(members))
    rows = [
        f"{_row(s.name, s.info, sections)} {'all' if len(s.members) == count else _code(s.members)} |"
        for s in union_settings(section.classes)
    ]
    table = [f"| key | type | default | meaning | `{key}` |", "|---|---|---|---|---|", *rows]
    return [
        *textwrap.wrap(f"Keys: {', '.join(keys)}. The setting `{key}` selects the other settings.", 120),
        "",
        f"| `{key}` | meaning |",
        "|---|---|",
        *kinds,
        *(["", *table] if rows else []),
    ]


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def describe(cls: type[Config]) -> str:
    """Returns the first paragraph of the docstring of a class on one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())
