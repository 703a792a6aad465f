"""Reads files of users: YAML as plain values with the file and line of each key, JSON, and text.

Pipes, devices and files beyond a size limit are rejected before they are read, because a read may never end.
"""

import json
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from flowrl.config.base import ConfigError
from flowrl.config.user_errors import UserError

Key = tuple[str | int, ...]

_MAX_YAML_MB = 1
"""Maximum size of a YAML file in MB. PyYAML takes about 10 s for a file of this size."""

_INVALID = re.compile("[\0\ud800-\udfff]")
"""Characters that neither a path nor a UTF-8 file can contain."""

_MAX_SETTINGS = 20_000
"""Maximum number of settings and list entries of a file. The entries of an alias count at each use of the alias."""

MAX_MB = 256
"""Maximum size of a text file in MB (10^6 bytes). The largest tokenizers have 40 MB."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class InputFileError(UserError):
    """Raised if a file must not be read, or is not UTF-8 text or JSON."""


def find_file_problem(path: Path, max_mb: float | None = MAX_MB) -> str | None:
    """Returns why a file must not be read: it is a pipe, a device or a socket, or has more than `max_mb` MB.

    Returns None for folders and for files that do not exist, because the attempt to read them reports the error.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    if kind := _KINDS.get(stat.S_IFMT(status.st_mode)):
        return f"is {kind}, which may never end: use a regular file"
    if max_mb is not None and status.st_size > max_mb * 1e6:
        return f"has {status.st_size / 1e6:,.0f} MB, but at most {max_mb:g} MB are allowed: use a smaller file"
    return None


def read_text(path: Path, max_mb: float | None = MAX_MB) -> str:
    """Returns the content of a UTF-8 file. Raises OSError if the file cannot be opened, and InputFileError if it must
    not be read or is not UTF-8.
    """
    if problem := find_file_problem(path, max_mb):
        raise InputFileError(f"{path} {problem}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): restore the file, or convert it"
        ) from error


def read_json(path: Path, max_mb: float | None = MAX_MB) -> Any:  # Any: a value of JSON
    """Returns the value of a JSON file. Raises OSError if the file cannot be opened, and InputFileError if it must not
    be read or is not valid JSON.
    """
    text = read_text(path, max_mb)
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputFileError(f"{path} is not valid JSON ({error}): restore or correct the file") from error


def parse_json(text: str | bytes) -> Any:  # Any: a value of JSON
    """Returns the value of JSON text. Raises ValueError, also for thousands of nested lists or objects."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-4 as a number and 2026-01-31 as text, unlike PyYAML."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


_NAME = re.compile(r"\b[a-z]\w*(?:\.\w+)+|\b[a-z]+_\w+|\b[a-z]+(?= is )")
"""A name of a setting in a message. A single word may be prose, unless ` is ` and a value follow."""


@dataclass(frozen=True)
class Source:
    """Settings as plain values, and the location of each key. A location is `file:line`, or the override itself."""

    values: dict[str, Any]
    origins: dict[Key, str]

    def origin(self, key: Key) -> str:
        """Returns the location of `key`, or of the nearest enclosing mapping if `key` has no location."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins[key]

    def locations(self, key: Key, message: str) -> str:
        """Returns the locations of all settings that a message names, such as `a.yaml:3 and steps=5`.

        Starts with the location of `key`, the setting or the group that the message is about. Names are relative to
        this group or to a group that contains it. Settings with default values have no location. If no named setting
        has a location, returns the location of the nearest enclosing mapping.
        """
        groups = [key[:depth] for depth in range(len(key), -1, -1)]
        names = [tuple(match[0].split(".")) for match in _NAME.finditer(message)]
        named = (next((group + name for group in groups if group + name in self.origins), None) for name in names)
        parents = {other[:length] for other in self.origins for length in range(len(other))}
        settings = [found for found in (key, *named) if found in self.origins and found not in parents]
        *others, last = dict.fromkeys(self.origins[setting] for setting in settings) or [self.origin(key)]
        return f"{', '.join(others)} and {last}" if others else last

    def set(self, key: Key, value: Any, origins: dict[Key, str]) -> "Source":
        """Returns a copy in which `key` has `value`. Creates parent mappings that are missing or null.

        The name of a list entry is its index. The keys of `origins` are relative to `key`.
        """
        values = dict(self.values)
        inner: Any = values  # Any: a mapping or a list
        resolved: Key = ()
        for name in key[:-1]:
            resolved = (*resolved, entry := _entry(inner, name, resolved, origins[()]))
            child = inner[entry] if isinstance(inner, list) else inner.get(entry)
            child = {} if child is None else child
            if not isinstance(child, dict | list):
                raise ConfigError(f"{origins[()]}: {name} is {child!r}, but must be a group of settings")
            inner[entry] = inner = child.copy()
        resolved = (*resolved, entry := _entry(inner, key[-1], resolved, origins[()]))
        inner[entry] = value
        kept = {old: origin for old, origin in self.origins.items() if old[: len(key)] != resolved}
        return Source(values, kept | {resolved + below: origin for below, origin in origins.items()})


def _entry(group: dict[str, Any] | list[Any], name: str | int, key: Key, where: str) -> Any:  # Any: text or an index
    """Returns a name within the mapping or list at `key`. Raises ConfigError if a list has no such index."""
    if isinstance(group, dict):
        return str(name)
    if not (str(name).isdecimal() and int(name) < len(group)):
        allowed = "0" if len(group) == 1 else f"0 to {len(group) - 1}"
        raise ConfigError(
            f"{where}: {dotted(key)} is a list of {len(group)} entries, but {name} is not an index of it: "
            + (f"use {allowed}, or set the complete list" if group else "set the complete list")
        )
    return int(name)


def parse(text: str, where: str, *, numbered: bool) -> tuple[Any, dict[Key, str]]:
    """Parses YAML. Returns the value, and the location of each key: `where`, and with `numbered` also the line. Raises
    ConfigError.
    """
    loader = _Loader(text)
    origins: dict[Key, str] = {(): where}
    try:
        node = loader.get_single_node()
        _note_origins(node, (), where, numbered, origins)
        value = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        spot = f"{where}:{mark.line + 1}" if numbered and mark else where
        problem = error.problem or error.context or ""
        if r"'\t'" in problem:
            raise ConfigError(
                f"{spot}: has a tab, which YAML does not allow here: replace the tab by spaces"
            ) from error
        quoted = shlex.quote(where.removesuffix(text) + json.dumps(text, ensure_ascii=False))
        fix = "" if numbered else f": correct it, or quote it if it is text, as in {quoted}"
        raise ConfigError(f"{spot}: not valid YAML, {problem}{fix}") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example !!int before text
        raise ConfigError(f"{where}: not valid YAML, {error}") from error
    except RecursionError:
        raise ConfigError(
            f"{where}: groups of settings are nested too deeply, or an alias contains itself: remove groups or the "
            f"alias"
        ) from None
    finally:
        loader.dispose()
    return value, origins


def read(path: Path) -> Source:
    """Returns the settings in the YAML file `path`. Raises ConfigError."""
    try:
        text = read_text(path, _MAX_YAML_MB)
    except InputFileError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        if re.match(r"[\w.]+=", str(path)):
            raise ConfigError(f"{path} is a setting, but the first argument is the YAML file of a recipe") from error
        raise ConfigError(f"{path}: cannot be read, {error.strerror}{folder_hint(path)}") from error
    values, origins = parse(text, str(path), numbered=True)
    if not isinstance(values, dict):
        problem = "is empty" if values is None else f"is a {type(values).__name__}"
        raise ConfigError(
            f"{path}: {problem}, but must be a mapping of settings to values, like recipes/grpo/arithmetic.yaml"
        )
    return Source(values, origins)


def folder_hint(path: Path) -> str:
    """Returns a hint that lists the YAML files in the folder of a missing file. Empty if the folder has none."""
    names = [] if path.exists() else sorted(file.name for file in path.parent.glob("*.yaml"))
    return f"; the folder {path.parent.absolute()} has {', '.join(names)}" if names else ""


def _note_origins(node: yaml.Node | None, key: Key, where: str, numbered: bool, origins: dict[Key, str]) -> None:
    """Adds the locations of all keys below `node` to `origins`."""
    if isinstance(node, yaml.ScalarNode) and _INVALID.search(node.value):
        line = f":{node.start_mark.line + 1}" if numbered else ""
        raise ConfigError(f"{where}{line}: {dotted(key)} has a NUL or an unpaired surrogate: remove the character")
    if isinstance(node, yaml.SequenceNode):
        children = [(index, child, child) for index, child in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(_name(name, where), name, child) for name, child in node.value]
    else:
        return
    for name, mark, child in children:
        origin = f"{where}:{mark.start_mark.line + 1}" if numbered else where
        if (*key, name) in origins:
            raise ConfigError(f"{origin}: {dotted((*key, name))} is set twice: remove one")
        origins[(*key, name)] = origin
        if len(origins) > _MAX_SETTINGS:
            top, *_ = (*key, name)
            raise ConfigError(
                f"{origins[(top,)]}: with {top}, the file has more than {_MAX_SETTINGS:,} settings: remove aliases or "
                f"settings"
            )
        _note_origins(child, (*key, name), where, numbered, origins)


def _name(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
        raise ConfigError(f"{where}:{node.start_mark.line + 1}: key {node.value!r} is not text: quote it")
    return node.value


def dotted(key: Key) -> str:
    """Returns `key` in the form of an override, such as actor.optimizer.lr."""
    return ".".join(map(str, key))
