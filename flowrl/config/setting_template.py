"""Renders the settings of a recipe as a commented YAML file, in which only the required values are missing."""

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from flowrl.config.base import Config
from flowrl.config.placement import Placement
from flowrl.config.run import RunConfig
from flowrl.config.setting_reference import (
    Classes,
    default_of,
    describe,
    is_collection,
    type_of,
    union_settings,
    yaml_text,
)
from flowrl.config.setting_tree import accepted_fields, config_classes, meaning_of, names_of, select_members

_WIDTH = 100
_INDENT = "  "

_HEADER = """Settings marked `required` have no value yet. All other settings have their defaults and can be removed. A
comment after a value lists the allowed values."""


def render_template(cls: type[RunConfig]) -> str:
    """Returns a YAML file with all settings of a recipe. `load` reads it after its required values are added."""
    lines = [
        *_comment(describe(cls), ""),
        *_comment(_HEADER, ""),
        f"recipe: {cls.__module__}:{cls.__qualname__}",
        *_Template(cls.possible_roles()).group((cls,), "", skipped=("recipe",)),
    ]
    return "\n".join(lines) + "\n"


class _Template:
    """Renders groups of settings. A class that occurs twice is explained at its first key."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self._roles = roles
        self._keys: dict[Classes, str] = {}
        """Key at which a group is explained."""

    def group(self, classes: Classes, indent: str, prefix: str = "", skipped: tuple[str, ...] = ()) -> Iterator[str]:
        """Yields the lines of all settings of a class."""
        (cls,) = classes
        for name, info, _ in accepted_fields(cls):
            if name in skipped:
                continue
            if not prefix:
                yield ""
            yield from _comment(meaning_of(info), indent)
            required = "required" if info.is_required() else ""
            if name in cls.ALTERNATIVES[:1]:
                *others, last = cls.ALTERNATIVES[1:]
                names = f"{', '.join(others)} or {last}" if others else last
                required = f"required unless {names} is set"
            yield from self._setting(name, info, indent, prefix, required, cls)

    def _elements(self, cls: type[Config], classes: Classes, indent: str) -> Iterator[str]:
        """Yields a comment with the settings of the groups in a collection, which is a setting of `cls`."""
        if select_members(classes):
            yield from self._other_members(classes, "", indent)
            return
        for element in classes:
            fields = element.model_fields
            shared = [name for name in fields if name in cls.model_fields]
            settings = [_with_default(name, info) for name, info in fields.items() if name not in shared]
            if shared:
                settings.append(f"{', '.join(shared)} as above")
            yield from _comment(f"A group has {', '.join(settings)}.", indent)
            for name, info in fields.items():
                inner = config_classes(info.annotation)
                if name not in shared and inner and not is_collection(info) and not select_members(inner):
                    nested = ", ".join(_with_default(key, each) for key, each in inner[0].model_fields.items())
                    yield from _comment(f"{name} has {nested}.", indent)

    def _setting(
        self, name: str, info: FieldInfo, indent: str, prefix: str, required: str, cls: type[Config] = Config
    ) -> Iterator[str]:
        """Yields the lines of a setting of `cls`."""
        classes, key = config_classes(info.annotation), f"{prefix}{name}"
        default = None if required else default_of(info)
        if is_collection(info):
            yield from self._elements(cls, classes, indent)
        if not classes or is_collection(info):
            allowed = type_of(info).replace("`", "").removesuffix(" or null" if required else "")
            line = f"{indent}{name}:{'' if required else f' {yaml_text(default)}'}"
            if len(line) + len(allowed) + len(required) > _WIDTH:
                yield from _comment(f"Allowed: {allowed}.", indent)
                yield f"{line}{f'  # {required}' if required else ''}"
            else:
                comment = f"{required} ({allowed})" if " " in required else f"{required}: {allowed}"
                yield f"{line}  # {comment if required else allowed}"
        elif classes == (Placement,) and default is not None:
            yield f"{indent}{name}:"
            (pool,) = default["pools"]
            roles = dict.fromkeys(self._roles, pool)
            for setting, value in {"device": "auto", **default, "roles": roles}.items():
                yield f"{indent}{_INDENT}{setting}: {yaml_text(value)}"
        elif select_members(classes):
            yield from self._union(name, classes, indent, key, default)
        elif default is None and not required:
            yield f"{indent}{name}: null"
            if classes not in self._keys:
                # Comments within these lines keep their indentation.
                yield from (f"{indent}# {line}".rstrip() for line in self._nested(name, classes, "", key))
        else:
            yield from self._nested(name, classes, indent, key)

    def _nested(self, name: str, classes: Classes, indent: str, key: str) -> Iterator[str]:
        """Yields the lines of a group with one class. If it is already explained, yields the required settings."""
        explained = self._keys.setdefault(classes, key)
        if not classes[0].model_fields:
            yield f"{indent}{name}: {{}}"
            return
        if explained == key:
            yield f"{indent}{name}:"
            yield from self.group(classes, indent + _INDENT, f"{key}.")
            return
        required = {n: info for n, info in classes[0].model_fields.items() if info.is_required()}
        if not required:
            yield f"{indent}{name}: {{}}  # settings as in {explained}"
            return
        yield f"{indent}{name}:  # more settings as in {explained}"
        for setting, info in required.items():
            yield from self._setting(setting, info, indent + _INDENT, f"{key}.", "required")

    def _union(self, name: str, classes: Classes, indent: str, key: str, default: Any) -> Iterator[str]:
        """Yields the settings of the selected member of a union, and the other members' settings as comments."""
        members = select_members(classes)
        selector, names = members[0].KEY, names_of(members)
        if default is not None and not isinstance(default, dict):
            yield from _comment(f"A group has one of {selector} {', '.join(names)}.", indent)
            yield from self._other_members(classes, "", indent)
            yield f"{indent}{name}: {yaml_text(default)}"
            return
        chosen = "" if default is None else default[selector]
        inner = indent + _INDENT
        yield f"{indent}{name}:"
        yield from _comment(f"One of {', '.join(names)}.", inner)
        yield f"{inner}{selector}:{f' {chosen}' if chosen else '  # required'}"
        for setting in union_settings(classes):
            if len(setting.members) == len(names) or chosen in setting.members:
                yield from _comment(meaning_of(setting.info), inner)
                required = "required" if setting.info.is_required() else ""
                yield from self._setting(setting.name, setting.info, inner, f"{key}.", required)
        yield from self._other_members(classes, chosen, inner)

    def _other_members(self, classes: Classes, chosen: str, indent: str, prefix: str = "") -> Iterator[str]:
        """Yields a comment per member of a union with the settings that it does not share with all members."""
        members = select_members(classes)
        num_names = len(names_of(members))
        for member in members:
            settings = [
                _with_default(s.name, s.info)
                for s in union_settings(classes)
                if member.names()[0] in s.members and len(s.members) < num_names
            ]
            if settings and chosen not in member.names():
                names = " or ".join(member.names())
                yield from _comment(f"{prefix}{member.KEY} {names} has {', '.join(settings)}.", indent)
        for setting in union_settings(classes):
            inner = config_classes(setting.info.annotation)
            if select_members(inner) and len(setting.members) < num_names:
                yield from self._other_members(inner, "", indent, f"{setting.name}: ")


def _with_default(name: str, info: FieldInfo) -> str:
    return f"{name}: {'(required)' if info.is_required() else yaml_text(default_of(info))}"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent), break_long_words=False):
        yield f"{indent}# {line}"
