"""Base classes and types of settings: errors, names of functions, shared field types, and discriminated unions."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import core_schema

from flowrl.config.user_errors import UserError, convert_errors, error_text


class ConfigError(UserError):
    """Raised for an invalid config file or `key=value` override. The message names the file, the line and the fix."""


# Names of functions and classes.


class ImportNameError(UserError):
    """Raised for a malformed name, or if the module or its attribute cannot be imported."""


def check_import_name(name: str) -> str:
    """Returns `name` if it has the form `module:attribute` or `path/to/file.py:attribute`, otherwise raises
    ImportNameError. Does not import the module.
    """
    if not is_import_name(name):
        raise ImportNameError(
            f"{name!r} must have the form module:name, like flowrl.rewards.final_number:score, or path/to/file.py:name"
        )
    return name


def is_import_name(text: str) -> bool:
    """Returns whether a text has the form `module:attribute` or `path/to/file.py:attribute`."""
    return re.fullmatch(r"([A-Za-z_][\w.]*|[^:]*[^:/]\.py):[A-Za-z_]\w*", text) is not None


def import_attribute(name: str) -> Any:  # Any: the named object has any type
    """Imports the module in `name`, which has the form `module:attribute`, and returns the attribute.

    The module can also be a file, `path/to/file.py:attribute`, which is executed once per process.

    Raises: ImportNameError if the import fails for any reason. The `__cause__` of the error is the original exception.
    """
    module, _, attribute = check_import_name(name).partition(":")

    def describe(error: BaseException) -> ImportNameError:
        if isinstance(error, FileNotFoundError):
            return ImportNameError(f"cannot import {name} ({error.filename} does not exist): correct the path")
        fix = f"correct {module}" if module.endswith(".py") else "correct the name or PYTHONPATH"
        return ImportNameError(f"cannot import {name} ({error_text(error)}): {fix}")

    with convert_errors(describe):
        return getattr(_import_file(module) if module.endswith(".py") else importlib.import_module(module), attribute)


def imported_module_name(name: str) -> str:
    """Returns the name in `sys.modules` of the module that `import_attribute(name)` imports."""
    module = name.partition(":")[0]
    if not module.endswith(".py"):
        return module
    path = Path(module).resolve()
    return f"{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


def _import_file(file: str) -> ModuleType:
    """Executes a Python file as a module. The name of the module depends only on the path of the file."""
    name = imported_module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(file).resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle use `sys.modules`
    try:
        spec.loader.exec_module(module)
    except BaseException:  # otherwise, the next import would find an incomplete module
        del sys.modules[name]
        raise
    return module


def import_function(name: str) -> Any:  # Any: the signature is the caller's
    """Imports the function that `name` (`module:function`) refers to. Raises ImportNameError."""
    function = import_attribute(name)
    if not callable(function):
        raise ImportNameError(f"{name} is a {type(function).__name__}, but must be a function")
    return function


Capabilities = TypeVar("Capabilities")


def find_capabilities(
    name: str, known: Mapping[str, Capabilities], what: str, kind: type[Capabilities]
) -> Capabilities:
    """Returns the capabilities of an included engine, or the attribute `capabilities` of a user's engine.

    Args:
        name: name of an included engine, or `module:Class`.
        known: capabilities of the included engines by name.
        what: kind of engine, for messages.
        kind: type of the capabilities.
    Raises ImportNameError if the name is unknown, if the import fails, or if the class lacks the attribute.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ImportNameError(unknown_name(what, name, known, custom=CUSTOM_CLASS))
    engine = import_attribute(name)
    capabilities = getattr(engine, "capabilities", None)
    if isinstance(engine, type) and isinstance(capabilities, kind):
        return capabilities
    raise ImportNameError(
        f"{name} is not a {what}: it must be a class whose attribute `capabilities` has the type {kind.__name__} "
        f"(docs/extend.md)"
    )


def missing_members(cls: type, protocols: Iterable[type], *, with_properties: bool = True) -> list[str]:
    """Returns the members of `protocols` that `cls` lacks: methods and, with `with_properties`, properties. A method
    without a keyword-only parameter of the protocol is returned as `method(parameter)`.
    """

    def missing(name: str, member: Any) -> Iterator[str]:
        own = getattr(cls, name, None)
        if isinstance(member, property):
            if with_properties and not hasattr(cls, name):
                yield name
        elif not callable(own):
            yield name
        elif inspect.isfunction(member) and inspect.isfunction(own):
            known = inspect.signature(own).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            for parameter in inspect.signature(member).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in known and not takes_any:
                    yield f"{name}({parameter.name})"

    members = {name: member for protocol in protocols for name, member in vars(protocol).items() if name[0] != "_"}
    return [lacking for name, member in members.items() for lacking in missing(name, member)]


def check_members(what: str, missing: Sequence[str]) -> None:
    """Raises ConfigError if a user's class lacks members that its capabilities require. `what` names the class."""
    if missing:
        raise ConfigError(
            f"{what} has no {', '.join(missing)}, which the protocol of its capabilities requires: add "
            f"{'it' if len(missing) == 1 else 'them'} (docs/extend.md)"
        )


# Settings and field types.

RECORDED = "recorded"
"""Validation context for the `config.yaml` of a run. Settings without effect get their default instead of an error,
because an earlier version of flowrl may have accepted them.
"""


@dataclass(frozen=True)
class Dependency:
    """Settings of a group that have an effect only under a condition."""

    settings: tuple[str, ...]
    """Names within the group. Dots select settings of inner groups."""

    is_met: Callable[[Any], bool]  # Any: the group
    """Function of the group that returns whether the settings have an effect."""

    reason: str
    """Completes the message `NAME is VALUE, but ...`: the reason why a setting has no effect, and the fix."""

    is_error: bool = True
    """Whether a setting without effect is rejected. If False, the run logs a warning when it starts. False is for
    settings that a coefficient or an interval of 0 disables, because users may set 0 only temporarily.
    """


class Config(BaseModel):
    """A frozen group of settings. Each field has a docstring with its unit and effect."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # A command uses few of the classes.
    )

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ()
    """Names of nullable settings of which exactly one must be set."""

    DEPENDENCIES: ClassVar[tuple[Dependency, ...]] = ()
    """Conditions without which settings have no effect. Only values that differ from the default are reported, because
    the `config.yaml` of a run contains all settings.
    """

    @classmethod
    def unsupported_settings(cls) -> Mapping[str, str]:
        """Returns name within the group -> reason and fix, for each setting that the class has but does not accept.

        docs/config.md and the templates of recipes omit them.
        """
        return {}

    def find_unused(self, *, is_error: bool) -> Iterator[str]:
        """Yields a message per changed setting without effect.

        With `is_error`, reports settings that are errors, including unsupported settings. Otherwise, reports settings
        that only cause a warning.
        """
        for name, reason in self._names_of_unused(is_error=is_error).items():
            yield from (f"{change}, but {reason}" for change in self._describe_changes(name))

    def _names_of_unused(self, *, is_error: bool) -> dict[str, str]:
        """Returns name -> reason for each setting without effect, including settings with their default value.

        The names are relative to the group. `is_error` selects dependencies, as in `find_unused`.
        """
        reasons = {} if not is_error else dict(self.unsupported_settings())
        for dependency in self.DEPENDENCIES:
            if dependency.is_error is is_error and not dependency.is_met(self):
                reasons |= dict.fromkeys(dependency.settings, dependency.reason)
        return reasons

    def _describe_changes(self, name: str) -> Iterator[str]:
        """Yields `NAME is VALUE` if a setting within the group, or within a list in it, differs from its default."""
        first, _, rest = name.partition(".")
        if first not in type(self).model_fields:
            return
        value = dict(self)[first]
        if rest:
            entries = enumerate(value) if isinstance(value, tuple) else ()
            for key, group in [(first, value), *((f"{first}.{i}", entry) for i, entry in entries)]:
                if isinstance(group, Config):
                    yield from (f"{key}.{change}" for change in group._describe_changes(rest))
        elif value != type(self).model_fields[first].get_default(call_default_factory=True):
            is_text = isinstance(value, str | Path)
            yield f"{name} is {'set' if isinstance(value, Config) else value if is_text else json.dumps(value)}"

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        num_set = sum(value is not None for name, value in self if name in self.ALTERNATIVES)
        if self.ALTERNATIVES and num_set != 1:
            state = "are unset" if num_set == 0 else "are set together"
            raise ValueError(f"{' and '.join(self.ALTERNATIVES)} {state}: set exactly one")
        return self

    @model_validator(mode="after")
    def _check_dependencies(self, info: ValidationInfo) -> Self:
        if info.context is RECORDED:
            return self._with_defaults(self._names_of_unused(is_error=True))
        for message in self.find_unused(is_error=True):
            raise ValueError(message)
        return self

    def _with_defaults(self, names: Iterable[str]) -> Self:
        """Returns a copy in which the settings `names` have their defaults, also in the entries of lists."""
        changed: dict[str, Any] = {}
        for name in names:
            first, _, rest = name.partition(".")
            field = type(self).model_fields.get(first)
            if field is None:
                continue
            value = changed.get(first, dict(self)[first])
            if not rest:
                changed[first] = field.get_default(call_default_factory=True)
            elif isinstance(value, Config):
                changed[first] = value._with_defaults([rest])
            elif isinstance(value, tuple):
                changed[first] = tuple(
                    entry._with_defaults([rest]) if isinstance(entry, Config) else entry for entry in value
                )
        return self.model_copy(update=changed) if changed else self


# Strict mode rejects "3" for 3 and true for 1. YAML has neither paths nor tuples, so these types accept text and lists.
FilePath = Annotated[Path, Field(strict=False)]
TokenIds = Annotated[tuple[int, ...], Field(strict=False)]
ImportName = Annotated[str, AfterValidator(check_import_name)]

Device = Literal["auto", "cpu", "cuda"]

DeviceKind = Literal["cpu", "cuda"]
"""Kind of the devices of a plan. The plan has replaced `auto`."""


# Discriminated unions: one class per loss, estimator, correction or schedule, selected by a name.

CUSTOM = "module:function"
"""Tag of the union member for user functions. Settings name such a function as `module:function`."""

CUSTOM_CLASS = "module:Class"
"""Form of the name of a user's engine."""

OptionValues = Mapping[str, bool | int | float | str | None]

Options = Annotated[OptionValues, Field(description="Keyword arguments of the user function.")]


class Member(Config):
    """Base class of the members of a union. The field named by `KEY` is a `Literal` of names, or an `ImportName`."""

    KEY: ClassVar[str] = "kind"
    """Name of the field that selects the member."""

    NOUN: ClassVar[str] = "a choice"
    """Kind of the members, with an article, for error messages."""

    @classmethod
    def members(cls) -> Mapping[str, "type[Member]"]:
        """Returns name -> class. A base class that stands for a union returns its members."""
        return dict.fromkeys(cls.names(), cls)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the values of the field `KEY` that select this member."""
        return get_args(cls.model_fields[cls.KEY].annotation) or (CUSTOM,)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments for the selected function. Settings that are null are omitted."""
        settings = {name: value for name, value in self if name != self.KEY}
        if CUSTOM in self.names():
            return dict(settings["options"])
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class OneOf:
    """Annotation that makes a union of `Member` classes a tagged union, in which `module:function` is a valid tag."""

    default: str | None = None
    """Name of the selected member if the settings have no name. None requires a name."""

    allows_bare_name: bool = False
    """True: accepts the bare name instead of a mapping of settings."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        members = members_of(source)
        key = next(iter(members.values())).KEY

        def normalize(value: object) -> object:
            if self.allows_bare_name and isinstance(value, str):
                return {key: value}
            if self.default is not None and isinstance(value, Mapping) and key not in value:
                return {key: self.default, **value}
            return value

        def select(value: object) -> object:
            name = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
            return CUSTOM if isinstance(name, str) and ":" in name else name

        choices = {name: handler.generate_schema(member) for name, member in members.items()}
        return core_schema.no_info_before_validator_function(
            normalize, core_schema.tagged_union_schema(choices, discriminator=select)
        )


def members_of(union: Any) -> dict[str, type[Member]]:  # Any: a union type
    """Returns name -> member class for a union such as `AnySchedule`, or for a base class that stands for one."""
    if hasattr(union, "__metadata__"):
        union = get_args(union)[0]
    classes = (union,) if isinstance(union, type) else get_args(union)
    return {name: member for cls in classes for name, member in cls.members().items()}


def parse(union: Any, settings: object) -> Any:  # Any: a union type, and an instance of one of its members
    """Validates `settings` and returns them as an instance of the union's member class that they select."""
    return TypeAdapter(union).validate_python(settings)


def check_name(
    name: str,
    *,
    what: str,
    names: Sequence[str],
    custom: str = CUSTOM,
    load: Callable[[str], object] = check_import_name,
) -> str:
    """Returns `name` if it is in `names` or names an attribute of a module. Otherwise raises ValueError.

    Args:
        what: kind of the named thing, for messages.
        names: included functions or classes.
        custom: form of the name of a user's function or class, for messages and docs.
        load: checks the name of a user's function or class, and raises ValueError. The default checks only the form.
    """
    if ":" in name:
        load(name)
    elif name not in names:
        raise ValueError(unknown_name(what, name, names, custom=custom))
    return name


def unknown_name(what: str, name: object, names: Iterable[str], *, custom: str | None = CUSTOM) -> str:
    """Returns the error message for a name that is not one of `names`. `custom` is the form of a user's name."""
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    available = [*(known for known in names if known != CUSTOM), *([] if custom is None else [custom])]
    return f"unknown {what} {name!r}{hint}; available: {', '.join(available)}"


AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
KlKind = Annotated[str, AfterValidator(partial(check_name, what="KL estimator", names=KL_ESTIMATORS))]
Aggregation = Annotated[str, AfterValidator(partial(check_name, what="aggregation", names=AGGREGATIONS))]
