"""Settings of the functions of flowrl.algorithms, as one pydantic model per declaration (`declarations`)."""

import inspect
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model, model_validator

from flowrl.config.algorithm.declarations import REQUIRED, Declaration, declarations
from flowrl.config.base import CUSTOM, ImportName, Member, Options


class DeclaredMember(Member):
    """Base class of the settings of the functions of one kind. A direct subclass has their common settings."""

    REGISTRY: ClassVar[str] = ""
    """Name of the registry in flowrl.algorithms.registry."""

    CUSTOM_MEANING: ClassVar[str] = ""
    """Description of user functions of this kind."""

    DECLARATION: ClassVar[Declaration | None] = None
    """Declaration of the function. None for user functions, which are not imported to read settings."""

    @classmethod
    def base_of(cls, declaration: Declaration | None) -> type[Self]:
        """Returns the class with the common settings of a function."""
        return cls

    @classmethod
    def members(cls) -> Mapping[str, type[Self]]:
        """Returns name -> class of the settings, for each function of the kind, and for user functions."""
        return _members(cls) if "REGISTRY" in vars(cls) else super().members()  # pyright: ignore[reportReturnType]

    @classmethod
    def select(cls, name: str, **settings: Any) -> Self:  # Any: values of settings
        """Returns the settings of a function. Raises ValidationError for wrong settings."""
        member = cls.members()[CUSTOM if ":" in name else name]
        return member.model_validate({cls.KEY: name, **settings})

    @property
    def function_name(self) -> str:
        return dict(self)[self.KEY]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the function. Empty for user functions."""
        return () if self.DECLARATION is None else tuple(self.DECLARATION.inputs)

    def arguments(self) -> dict[str, Any]:
        if self.DECLARATION is None:
            return dict(dict(self)["options"])
        return {n: value for n, value in self if n in self.DECLARATION.settings and value is not None}

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raises ValueError if a check of the function refuses the settings, given facts of the run by name.

        Without facts, calls the checks that read only settings. With facts, calls the checks that read one of them.
        """
        values = dict(self)
        for check in () if self.DECLARATION is None else self.DECLARATION.checks:
            names = set(inspect.signature(check).parameters)
            if names <= {*values, *facts} and bool(names - values.keys()) == bool(facts):
                check(**{name: values[name] if name in values else facts[name] for name in names})

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        self.check({})
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The classes are created in each process, so they have no importable name.
        base = next(cls for cls in type(self).__mro__ if "REGISTRY" in vars(cls))
        return _restore, (base, self.function_name), self.__getstate__()


def _restore(base: type[DeclaredMember], name: str) -> DeclaredMember:
    cls = base.members()[CUSTOM if ":" in name else name]
    return cls.__new__(cls)


@cache
def _members(base: type[DeclaredMember]) -> Mapping[str, type[DeclaredMember]]:
    members = {name: _create(base, declaration) for name, declaration in declarations(base.REGISTRY).items()}
    return members | {CUSTOM: _create(base, None)}


def _create(base: type[DeclaredMember], declaration: Declaration | None) -> type[DeclaredMember]:
    fields: dict[str, Any]
    if declaration is None:
        name, meaning, fields = "Custom", base.CUSTOM_MEANING, {base.KEY: (ImportName, ...)}
        fields["options"] = (Options, Field(default_factory=dict))
    else:
        name, meaning = declaration.name, declaration.meaning
        fields = {base.KEY: (Literal[name], name)} | {
            key: (
                setting.annotation,
                Field(... if setting.default is REQUIRED else setting.default, description=setting.description),
            )
            for key, setting in declaration.settings.items()
        }
    parent = base.base_of(declaration)
    cls = create_model(f"{name}_{base.REGISTRY}", __base__=parent, __module__=__name__, __doc__=meaning, **fields)
    cls.DECLARATION = declaration
    return cls


_PLAIN = (bool, int, float, str, NoneType)


def find_problem(annotation: Any, value: object) -> str | None:
    """Returns the reason why a value does not match the annotation of a user's parameter, or None.

    Annotations of other types than plain values, such as an enumeration, match each value.
    """
    if not _is_plain(annotation):
        return None
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        return message[:1].lower() + message[1:]
    return None


def _is_plain(annotation: object) -> bool:
    """Returns whether a type has only the values of YAML: numbers, text, true, false and null."""
    if get_origin(annotation) is Literal or annotation in (None, *_PLAIN):
        return True
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return get_origin(annotation) in (Annotated, Union, UnionType) and all(_is_plain(part) for part in parts)
