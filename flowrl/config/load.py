"""Reads a YAML file and `key=value` overrides into a validated config.

Every invalid setting raises a ConfigError that names its key, its file and line, and a fix.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flowrl.config.algorithm.policy_loss import AnyPolicyLoss
from flowrl.config.base import Config, ConfigError, ImportNameError, Member, import_attribute, members_of, unknown_name
from flowrl.config.source import Key, Source, dotted, folder_hint, parse, read

C = TypeVar("C", bound=Config)

RENAMED_KEYS = {
    "rows_per_step": "batch_size",
    "minibatch_rows": "minibatch_size",
    "epochs": "ppo_epochs",
    "rollout.max_rows": "rollout.max_num_seqs",
    "rollout.transfer.chunk_mb": "rollout.transfer.bucket_mb",
    "rollout.vllm.max_row_tokens": "rollout.vllm.max_model_len",
    "schedule.redundancy": "schedule.overprovision",
    "actor.loss_options": "actor.loss.options",
    **{
        f"actor.{name}": f"actor.loss.{name}"
        for member in members_of(AnyPolicyLoss).values()
        for name in member.model_fields
        if name not in ("kind", "options")
    },
}
"""Maps a removed key to its new key. The error for a removed key names the new key."""


def load(path: str | Path, overrides: Sequence[str], cls: type[C]) -> C:
    """Returns the config in the file `path`, after applying each override `dotted.key=value`. Raises ConfigError.

    A group of settings, such as `placement`, may be the path of another YAML file. The path is relative to the working
    directory or to the folder of `path`.
    """
    source = _include(read(Path(path)), cls, Path(path).parent)
    for override in overrides:
        source = _include(_apply(source, override, cls), cls, Path(path).parent)
    if "recipe" in cls.model_fields:
        source = _set_recipe(source, cls)
    try:
        return cls.model_validate(source.values)
    except ValidationError as error:
        raise ConfigError(_message(error.errors(include_url=False), source, cls)) from error


def recipe_class(path: str | Path) -> type[Config]:
    """Returns the config class that the key `recipe` of the file `path` names. Raises ConfigError."""
    source = read(Path(path))
    name = source.values.get("recipe")
    where = source.origin(("recipe",))
    if not isinstance(name, str) or name.count(":") != 1:
        raise ConfigError(f"{where}: recipe is {name!r}, but must be module:Class, like recipes.ppo.config:PPOConfig")
    try:
        cls = import_attribute(name)
    except ImportNameError as error:
        cause = error.__cause__
        module = name.partition(":")[0]
        if isinstance(cause, ModuleNotFoundError) and not f"{module}.".startswith(f"{cause.name}."):
            raise cause from None  # The recipe exists; a module that it imports does not.
        raise ConfigError(f"{where}: recipe: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        raise ConfigError(f"{where}: recipe is {name}, but must be a config class")
    return cls


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
        members = _members(_walk(key[:depth], cls)[1])
        if isinstance(value, str) and value in _names(members):
            origin = source.origin(key[:depth])
            return source.set(key[:depth], {members[0].KEY: value}, {(): origin, (members[0].KEY,): origin})
    return source


def _include(source: Source, cls: type[Config], folder: Path) -> Source:
    """Replaces each path of a YAML file, given in place of a group of settings, by the contents of the file."""
    for name, field in cls.model_fields.items():
        value, classes = source.values.get(name), _classes(field.annotation)
        if not isinstance(value, str) or not classes:
            continue
        path = Path(value)
        if not path.exists() and ((folder / path).exists() or path.parent == Path()):
            path = folder / path
        if not path.is_file():
            raise ConfigError(f"{source.origin((name,))}: {_no_file(name, value, path, _members(classes))}")
        included = read(path)
        source = source.set((name,), included.values, included.origins)
    return source


def _no_file(name: str, value: str, path: Path, members: Sequence[type[Member]]) -> str:
    """Returns the error message for a text that is not the path of a file. The text may be a bare name, as in
    `schedule: async`.
    """
    missing = f"{name} is {value}, but there is no such file"
    if not members or "/" in value or path.suffix in (".yaml", ".yml"):
        return missing + folder_hint(path)
    key, names = f"{name}.{members[0].KEY}", _names(members)
    return f"{missing}: set {key}={value}" if value in names else unknown_name(key, value, names)


def _set_recipe(source: Source, cls: type[Config]) -> Source:
    """Sets `recipe` to `cls`. Raises ConfigError if the file names a different recipe."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    stated = source.values.get("recipe")
    if stated not in (None, name):
        program = f"{str(stated).partition(':')[0].removesuffix('.config')}.train"
        raise ConfigError(
            f"{source.origin(('recipe',))}: recipe is {stated}, but this program reads {name}: run it with "
            f"`python -m {program}`"
        )
    return source.set(("recipe",), name, {(): source.origin(("recipe",))})


def _message(errors: Sequence[ErrorDetails], source: Source, cls: type[Config]) -> str:
    # A misspelled key is also a missing key. The misspelling is the cause and therefore comes first.
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    key, classes = _walk(first["loc"], cls)
    origin = key
    match first["type"]:
        case "value_error":  # The first word of an error of a group is the setting.
            named = (*key, *first["msg"].removeprefix("Value error, ").partition(" ")[0].split("."))
            origin = named if named in source.origins else key
        case "union_tag_invalid":
            origin = (*key, _members(classes)[0].KEY)
        case "extra_forbidden":  # An override of a nested key creates the unknown group.
            origin = next((known for known in source.origins if known[: len(key)] == key), key)
    text = f"{source.origin(origin)}: {_problem(first, key, cls)}"
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more errors)"


def _problem(error: ErrorDetails, key: Key, cls: type[Config]) -> str:
    name, value, members = dotted(key), error["input"], _members(_walk(key, cls)[1])
    message = error["msg"].replace("Input should be", "must be").replace("Input is not", "is not")
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(error["loc"], key, cls)
        case "missing":
            description = (_fields(_walk(key[:-1], cls)[1])[str(key[-1])].description or "").splitlines()[0]
            is_acronym = description[1:2].isupper()
            text = description if is_acronym else description[:1].lower() + description[1:]
            return f"`{name}` is required: {text.rstrip('.')}"
        case "union_tag_invalid" | "union_tag_not_found" if isinstance(value, Mapping):
            setting = dotted((*key, members[0].KEY))
            if members[0].KEY in value:
                return unknown_name(setting, value[members[0].KEY], _names(members))
            return f"`{setting}` is required; available: {', '.join(_names(members))}"
        case "union_tag_invalid" | "union_tag_not_found":
            message = f"must be a group of settings with the key {members[0].KEY}"
        case "value_error":
            cause = message.removeprefix("Value error, ")
            return f"{name}: {cause}" if name else cause
        case "model_type" | "model_attributes_type":
            message = "must be a group of settings"
        case "tuple_type" | "list_type":
            message = "must be a list, in square brackets"
        case "dict_type" | "mapping_type":
            message = "must be a mapping, like {key: value}"
    return f"{name} is {'null' if value is None else repr(value)}, but {message[0].lower()}{message[1:]}"


def _unknown_key(loc: Key, key: Key, cls: type[Config]) -> str:
    """Returns the error message for an unknown key, with the most likely fix."""
    name, word, group = dotted(key), str(key[-1]), dotted(key[:-1])
    if name in RENAMED_KEYS and RENAMED_KEYS[name] in _setting_paths(cls):
        return f"{name} was renamed: set {RENAMED_KEYS[name]}"
    classes = _walk(loc[:-1], cls)[1]
    owners = _names([member for member in _members(_walk(key[:-1], cls)[1]) if word in member.model_fields])
    if owners and (selected := _members(classes)):
        setting = dotted((*key[:-1], selected[0].KEY))
        tag = next(str(part) for part in reversed(loc) if part in _names(selected))
        fix = f"set {setting}: {owners[0]}" if len(owners) == 1 else f"set {setting} to one of these"
        return f"{name} belongs to {selected[0].KEY} {', '.join(owners)}, not to {tag}: remove it, or {fix}"
    siblings = list(_fields(classes))
    near = [dotted((*key[:-1], sibling)) for sibling in difflib.get_close_matches(word, siblings, n=1)]
    if not near:
        leaves = {path: path.rpartition(".")[2] for path in _setting_paths(cls)}
        alike = difflib.get_close_matches(word, sorted(set(leaves.values())), n=1)
        near = [path for path, leaf in leaves.items() if leaf in alike][:3]
    if near:
        return f"unknown setting {name}; did you mean {' or '.join(near)}?"
    return f"unknown setting {name}; {group or 'the file'} accepts {', '.join(siblings)}"


def _setting_paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield prefix + name
        for path in dict.fromkeys(p for group in _classes(field.annotation) for p in _setting_paths(group)):
            yield f"{prefix}{name}.{path}"


def _fields(classes: Sequence[type[Config]]) -> dict[str, FieldInfo]:
    return {name: field for cls in classes for name, field in cls.model_fields.items()}


def _members(classes: Sequence[type[Config]]) -> list[type[Member]]:
    return [cls for cls in classes if issubclass(cls, Member)]


def _names(members: Sequence[type[Member]]) -> list[str]:
    return [name for member in members for name in member.names()]


def _walk(loc: Key, cls: type[Config]) -> tuple[Key, tuple[type[Config], ...]]:
    """Returns a pydantic error location without union tags, and the config classes at its end. A union has several
    classes.
    """
    key: list[str | int] = []
    classes: tuple[type[Config], ...] = (cls,)
    for part in loc:
        tagged = tuple(member for member in _members(classes) if part in member.names())
        if tagged and len(classes) > 1:
            classes = tagged
            continue
        key.append(part)
        field = _fields(classes).get(str(part))
        classes = _classes(field.annotation) if field else classes  # Keys of free mappings and list indices have none.
    return tuple(key), classes


def _classes(annotation: Any) -> tuple[type[Config], ...]:
    """Returns the config classes in a field's type, including those inside `X | None`, `Mapping[str, X]` and
    `Annotated`.
    """
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    return tuple(cls for part in get_args(annotation) for cls in _classes(part))
