"""Reads a YAML file and `key=value` overrides into a validated config.

Every invalid setting raises a ConfigError that names its key, its file and line, and a fix.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from flowrl.config.base import RECORDED, Config, ConfigError, ImportNameError, import_attribute
from flowrl.config.error_messages import describe_errors, unknown_choice
from flowrl.config.placement import Placement
from flowrl.config.setting_tree import (
    config_classes,
    find_disabled_settings,
    names_of,
    select_members,
    setting_paths,
    walk,
)
from flowrl.config.source import Key, Source, dotted, folder_hint, parse, read
from flowrl.config.user_errors import UserError

C = TypeVar("C", bound=Config)

_logger = logging.getLogger(__name__)


def load(path: str | Path | None, overrides: Sequence[str], cls: type[C]) -> C:
    """Returns the config in the file `path`, after applying each override `dotted.key=value`. Raises ConfigError.

    Without a path, all settings are overrides.

    A group of settings, such as `placement`, may be the path of another YAML file. The path is relative to the working
    directory or to the folder of `path`.
    """
    return _validate(_read_settings(None if path is None else Path(path), overrides, cls), cls)


def load_recorded(path: Path, cls: type[C]) -> C:
    """Returns the config in the `config.yaml` of a run. Raises ConfigError.

    Settings without effect, which `load` rejects, get their default, because the version of flowrl that started the run
    may have accepted them.
    """
    return _validate(read(path), cls, RECORDED)


def load_located(path: str | Path, overrides: Sequence[str], cls: type[C]) -> tuple[C, Callable[[str], str]]:
    """Returns the config, as `load` does, and a function that adds the locations of settings to a message that begins
    with a setting. Logs a warning per setting that another setting disables.
    """
    source = _read_settings(Path(path), overrides, cls)

    def locate(message: str) -> str:
        return "\n  ".join(_located(line) for line in message.split("\n  "))

    def _located(line: str) -> str:
        key = _leading_key(line, cls)
        return line if key is None else f"{source.locations(key, line)}: {line}"

    config = _validate(source, cls)
    for key, message in find_disabled_settings(config):
        _logger.warning("%s: %s%s", source.locations(key, message), "".join(f"{part}." for part in key), message)
    return config, locate


@contextmanager
def loading(path: str | Path, overrides: Sequence[str], cls: type[C]) -> Iterator[C]:
    """Yields the config, as `load` returns it. Adds file and line to a later UserError about a setting."""
    config, locate = load_located(path, overrides, cls)
    try:
        yield config
    except UserError as error:
        error.args = (locate(str(error)),)
        raise


def _leading_key(message: str, cls: type[Config]) -> Key | None:
    """Returns the key of the setting that a message begins with, or None.

    A message may also begin with a method, such as rollout.generate, or with a word of prose, which are not settings.
    """
    if (match := re.match(r"[a-z_]\w*((\.\w+)+|(?= is ))", message)) is None:
        return None
    key = tuple(match[0].split("."))
    if cls is Placement and key[0] == "placement":  # a placement file has no prefix
        return key[1:]
    return key if dotted(key[:2]) in setting_paths(cls) else None


def _read_settings(path: Path | None, overrides: Sequence[str], cls: type[Config]) -> Source:
    folder = Path() if path is None else path.parent
    source = _include(Source({}, {(): "command line"}) if path is None else read(path), cls, folder)
    problems: list[str] = []
    for override in overrides:
        try:
            source = _include(_apply(source, override, cls), cls, folder)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} overrides are invalid:"] * (len(problems) > 1) + problems))
    return _set_recipe(source, cls) if "recipe" in cls.model_fields else source


def _validate(source: Source, cls: type[C], context: str | None = None) -> C:
    try:
        return cls.model_validate(source.values, context=context)
    except ValidationError as error:
        raise ConfigError(describe_errors(error.errors(include_url=False), source, cls)) from error


def recipe_class(path: str | Path) -> type[Config]:
    """Returns the config class that the key `recipe` of the file `path` names. Raises ConfigError."""
    source = read(Path(path))
    name = source.values.get("recipe")
    where = source.origin(("recipe",))
    if not isinstance(name, str) or name.count(":") != 1:
        value = "null" if name is None else repr(name)
        raise ConfigError(f"{where}: recipe is {value}, but must be module:Class, like recipes.ppo.config:PPOConfig")
    try:
        return import_recipe(name, Config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def import_recipe(name: str, base: type[C]) -> type[C]:
    """Returns the config class `name`, as `module:Class`. Raises ConfigError if it is not a subclass of `base`."""
    try:
        cls = import_attribute(name)
    except ImportNameError as error:
        cause = error.__cause__
        module = name.partition(":")[0]
        if isinstance(cause, ModuleNotFoundError) and not f"{module}.".startswith(f"{cause.name}."):
            raise cause from None  # The recipe exists; a module that it imports does not.
        raise ConfigError(f"recipe: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"recipe is {name}, but must be a config class: name a subclass of {base.__name__}")
    return cls


def training_module(module: str) -> str:
    """Returns the module that trains a recipe: `train` next to the module `config` of its config class, or the module
    of the class itself.
    """
    return f"{module.removesuffix('.config')}.train" if module.endswith(".config") else module


def to_yaml(config: Config) -> str:
    """Returns all settings of `config` as YAML, including defaults. `load` reads the YAML back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(source: Source, override: str, cls: type[Config]) -> Source:
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or not all(key):
        raise ConfigError(f"{override!r} is not an override: write key=value, like actor.optimizer.lr=1e-5")
    value, origins = parse(text, override, numbered=False)
    return _expand_bare_names(source, key, cls).set(key, value, origins)


def _expand_bare_names(source: Source, key: Key, cls: type[Config]) -> Source:
    """Replaces a bare name above `key`, such as `loss: gspo`, by a mapping. Then `key` can be set in the mapping."""
    for depth in range(1, len(key)):
        value: Any = source.values
        for name in key[:depth]:
            value = value.get(name) if isinstance(value, Mapping) else None
        members = select_members(walk(key[:depth], cls)[1])
        if isinstance(value, str) and value in names_of(members):
            origin = source.origin(key[:depth])
            return source.set(key[:depth], {members[0].KEY: value}, {(): origin, (members[0].KEY,): origin})
    return source


def _include(source: Source, cls: type[Config], folder: Path) -> Source:
    """Replaces groups of settings that are given as the path of a YAML file by the contents of the file."""
    for name, field in cls.model_fields.items():
        value, classes = source.values.get(name), config_classes(field.annotation)
        if not isinstance(value, str) or not classes:
            continue
        path = Path(value)
        if not path.exists() and ((folder / path).exists() or path.parent == Path()):
            path = folder / path
        if Placement in classes and not path.is_file():
            path = find_included_placements().get(value, path)
        if not path.is_file():
            raise ConfigError(f"{source.origin((name,))}: {_no_file(name, value, path, folder, cls)}")
        included = read(path)
        source = source.set((name,), included.values, included.origins)
    return source


def _no_file(name: str, value: str, path: Path, folder: Path, cls: type[Config]) -> str:
    """Returns the error message for a text that is not the path of a file. The text may be a bare name, as in
    `schedule: async`.
    """
    classes = config_classes(cls.model_fields[name].annotation)
    members = select_members(classes)
    missing = f"{name} is {value}, but there is no such file"
    is_path = "/" in value or path.suffix in (".yaml", ".yml")
    if Placement in classes:
        folders = " or ".join(dict.fromkeys(str(tried.absolute()) for tried in (Path(), folder)))
        searched = "" if Path(value).is_absolute() else f" in {folders}"
        return (
            f"{missing}{searched}: write the path of a file, the name of an included placement "
            f"({', '.join(find_included_placements())}), or a mapping, like "
            f"{{pools: {{main: all}}, roles: {{actor: main}}}}{folder_hint(path) if is_path else ''}"
        )
    if not members or is_path:
        return missing + folder_hint(path)
    setting = f"{name}.{members[0].KEY}"
    is_known = value in names_of(members)
    return f"{missing}: set {setting}={value}" if is_known else unknown_choice(setting, value, members, cls)


def find_included_placements() -> dict[str, Path]:
    """Returns the files of the placements that are installed with flowrl, by name, such as `split`."""
    package = Path(str(files("flowrl")))
    installed, source = package / "placements", package.parent / "placement"
    # An editable installation imports flowrl from the source tree.
    folder = installed if installed.is_dir() else source
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _set_recipe(source: Source, cls: type[Config]) -> Source:
    """Sets `recipe` to `cls`. Raises ConfigError if the file names a different recipe."""
    name = f"{_module_name(cls)}:{cls.__qualname__}"
    stated = source.values.get("recipe")
    if stated not in (None, name):
        program = training_module(str(stated).partition(":")[0])
        raise ConfigError(
            f"{source.origin(('recipe',))}: recipe is {stated}, but this program reads {name}: run it with "
            f"`python -m {program}`"
        )
    return source.set(("recipe",), name, {(): source.origin(("recipe",))})


def _module_name(cls: type[Config]) -> str:
    """Returns the name under which the module of `cls` can be imported, also if the module runs as a program."""
    main = sys.modules["__main__"]
    if cls.__module__ != "__main__":
        return cls.__module__
    if main.__spec__ is not None:  # python -m mine
        return main.__spec__.name
    return Path(main.__file__).stem if main.__file__ else "__main__"  # python mine.py
