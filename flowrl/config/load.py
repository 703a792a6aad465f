"""From a YAML file and `key=value` overrides to one validated config, or one sentence that says what is wrong where."""

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from flowrl.config.algorithm.choice import ChoiceConfig, OtherChoice
from flowrl.config.base import Config, ConfigError
from flowrl.config.source import Key, Source, dotted, others_beside, parse, read

C = TypeVar("C", bound=Config)


def load(path: str | Path, overrides: Sequence[str], cls: type[C]) -> C:
    """The config in `path`, with each `dotted.key=value` of `overrides` (value in YAML) put over it in order.

    A setting that is itself a group, such as `placement`, may be the path of a YAML file, relative to the working
    folder or else to the folder of `path`. Raises: ConfigError, one sentence with key, file and line.
    """
    source = _include(read(Path(path)), cls, Path(path).parent)
    for override in overrides:
        source = _include(_apply(source, override), cls, Path(path).parent)
    if "recipe" in cls.model_fields:
        source = _with_recipe(source, cls)
    try:
        return cls.model_validate(source.values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(include_url=False), source, cls)) from error


def recipe_class(path: str | Path) -> type[Config]:
    """The config class that the file `path` names by its key `recipe: module:Class`.

    Raises: ConfigError when the key is missing or names no config class.
    """
    source = read(Path(path))
    name = source.values.get("recipe")
    where = source.origin(("recipe",))
    if not isinstance(name, str) or name.count(":") != 1:
        raise ConfigError(f"{where}: recipe is {name!r}, but must be module:Class, like recipes.ppo.config:PPOConfig")
    module, _, attribute = name.partition(":")
    try:
        found = vars(importlib.import_module(module)).get(attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the recipe is there; something that it imports is not
        raise ConfigError(
            f"{where}: recipe {name} has no module {error.name} here: correct the name or install it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Config)):
        raise ConfigError(f"{where}: recipe is {name}, but {module} has no config class {attribute}")
    return found


def to_yaml(config: Config) -> str:
    """Every setting of `config`, defaults too, as YAML that `load` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(source: Source, override: str) -> Source:
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or not all(key):
        raise ConfigError(f"{override!r} is not an override: write key=value, like actor.optimizer.lr=1e-5")
    value, origins = parse(text, override, numbered=False)
    return source.set(key, value, origins)


def _include(source: Source, cls: type[Config], folder: Path) -> Source:
    """`source` with the contents of each file that stands where `cls` has a group of settings."""
    for name, field in cls.model_fields.items():
        value = source.values.get(name)
        if isinstance(value, str) and _group(field.annotation) and not _is_word(value, field.annotation):
            path = Path(value)
            if not path.exists() and (folder / path).exists():
                path = folder / path
            if not path.is_file():
                where = path if path.parent != Path() else folder / path
                raise ConfigError(
                    f"{source.origin((name,))}: {name} is {value}, and there is no such file"
                    f"{_choice_meant(name, value, _group(field.annotation)) or others_beside(where)}"
                )
            included = read(path)
            source = source.set((name,), included.values, included.origins)
    return source


def _with_recipe(source: Source, cls: type[Config]) -> Source:
    """`source` naming `cls` as its recipe; a file of another recipe is refused before its keys confuse anyone."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    stated = source.values.get("recipe")
    if stated not in (None, name):
        raise ConfigError(
            f"{source.origin(('recipe',))}: recipe is {stated}, but this program reads {name}: run its own program"
        )
    return source.set(("recipe",), name, {(): source.origin(("recipe",))})


def _choice_meant(name: str, value: str, group: type[Config] | None) -> str:
    """What was probably meant by a word, which is no path, that stands where a group with a choice does."""
    if group is None or not issubclass(group, ChoiceConfig) or "/" in value or value.endswith((".yaml", ".yml")):
        return ""
    key = f"{name}.{group.CHOICE}"
    if value in group.CHOICES:
        return f": for that choice set {key}={value}"
    near = difflib.get_close_matches(value, group.CHOICES, n=1)
    meant = f", did you mean {key}={near[0]}?" if near else ""
    return f", nor such a choice: {key} is one of {', '.join(group.CHOICES)}{meant}"


def _sentence(errors: Sequence[ErrorDetails], source: Source, cls: type[Config]) -> str:
    # A misspelt key is also a missing one: the misspelling is the cause, so it comes first.
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    key: Key = first["loc"]
    text = f"{_origin(first, source)}: {_problem(first, key, cls)}"
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more to correct)"


def _origin(error: ErrorDetails, source: Source) -> str:
    """Where the setting was written that the error is about: that of a whole group begins with the setting's name."""
    key: Key = error["loc"]
    if error["type"] == "value_error":
        word = _meaning(error).partition(" ")[0]
        key = named if (named := (*key, *word.split("."))) in source.origins else key
    elif error["type"] == "extra_forbidden":  # made by what was set below it
        key = next((found for found in source.origins if found[: len(key)] == key), key)
    return source.origin(key)


def _meaning(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _problem(error: ErrorDetails, key: Key, cls: type[Config]) -> str:
    name = dotted(key)
    if error["type"] == "extra_forbidden":
        return f"{name} is not a setting; {_suggestion(key, cls)}"
    if error["type"] == "missing":
        group = _group_at(cls, key[:-1])
        field = group.model_fields.get(str(key[-1])) if group else None
        meaning = field.description.splitlines()[0] if field and field.description else "it has no default"
        return f"{name} is missing: {meaning}"
    if error["type"] == "value_error":
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, OtherChoice):
            return cause.within(f"{name}." if name else "")
        return f"{name}: {_meaning(error)}" if name else _meaning(error)
    if error["type"] == "model_type":
        return f"{name} is {error['input']!r}, but it is a group of settings"
    if error["type"] in ("tuple_type", "list_type"):
        return f"{name} is {error['input']!r}, but must be a list, in square brackets"
    if error["type"] in ("dict_type", "mapping_type"):
        return f"{name} is {error['input']!r}, but must be a mapping, like {{key: value}}"
    message = error["msg"].replace("Input should be", "must be").replace("Input is not", "is not")
    return f"{name} is {error['input']!r}, but {message[0].lower()}{message[1:]}"


def _suggestion(key: Key, cls: type[Config]) -> str:
    """What was probably meant: a sibling spelt alike, or the same word, nearly, in another group."""
    siblings = list(_fields(_group_at(cls, key[:-1])))
    word = str(key[-1])
    near = [dotted((*key[:-1], name)) for name in difflib.get_close_matches(word, siblings, n=1)]
    paths = {path: path.rpartition(".")[2] for path in _setting_paths(cls)}
    if not near:
        alike = difflib.get_close_matches(word, sorted(set(paths.values())), n=1)
        near = [path for path, leaf in paths.items() if leaf in alike][:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{dotted(key[:-1]) or 'the file'} takes {', '.join(siblings)}"


def _setting_paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield prefix + name
        group = _group(field.annotation)
        if group:
            yield from _setting_paths(group, f"{prefix}{name}.")


def _fields(cls: type[Config] | None) -> Mapping[str, Any]:
    return cls.model_fields if cls else {}


def _group_at(cls: type[Config] | None, key: Key) -> type[Config] | None:
    """The config class of the group at `key`, below `cls`; keys of a free mapping (a role's name) are stepped over."""
    for name in key:
        field = _fields(cls).get(str(name))
        cls = _group(field.annotation) if field else cls
    return cls


def _group(annotation: Any) -> type[Config] | None:
    """The config class in a field's type, inside `X | None` or `Mapping[str, X]` too."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next((group for part in get_args(annotation) if (group := _group(part))), None)


def _is_word(value: str, annotation: Any) -> bool:
    """Whether the type names the text itself, as `X | Literal["auto"]` does."""
    return any(part == value or _is_word(value, part) for part in get_args(annotation))
