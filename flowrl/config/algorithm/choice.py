"""Settings that belong to one of several choices: an estimator, a loss, a correction."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, model_validator

from flowrl.config.base import Config, check_import

OWN = "module:function"
"""The entry of `CHOICES` for a function of the user's."""

REQUIRED = ...
"""In `CHOICES`, for a setting that has no default."""

Options = Mapping[str, bool | int | float | str | None]
"""Keyword arguments of a function of the user's."""


def known_name(what: str, names: Iterable[str]) -> Callable[[str], str]:
    """A check that a setting is one of the names, or `module:function`."""

    def check(name: str) -> str:
        if ":" in name:
            return check_import(name)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise ValueError(
                f"{name!r} is no {what}; {meant} are {', '.join(names)}, and your own is named as module:function"
            )
        return name

    return check


KlKind = Annotated[str, AfterValidator(known_name("KL estimate", ("k1", "k2", "k3", "abs")))]
Aggregation = Annotated[
    str,
    AfterValidator(
        known_name(
            "aggregation", ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
        )
    ),
]


class OtherChoice(ValueError):
    """A setting was given that belongs to another choice of its group."""

    def __init__(self, name: str, choice: str, chosen: str, owners: Sequence[str]) -> None:
        """`choice` is the field that chooses; `owners` have the setting `name`, and what was `chosen` has it not."""
        self.name, self.choice, self.chosen, self.owners = name, choice, chosen, owners
        super().__init__(self.within(""))

    def within(self, group: str) -> str:
        """The sentence, for a group of this name with its dot."""
        key = f"{group}{self.choice}"
        fix = f"set {key}: {self.owners[0]}" if len(self.owners) == 1 else f"set {key} to one of these"
        return (
            f"{group}{self.name} belongs to {self.choice} {', '.join(self.owners)} and does nothing for "
            f"{self.chosen}: remove it, or {fix}"
        )


class ChoiceConfig(Config):
    """A group of settings of which one, the choice, says which of the others mean something.

    A setting of another choice is refused, not ignored. Settings of the choice that are not given, or null, get the
    choice's own default, so that a resolved config shows what is in force; those of others are null.
    """

    CHOICE: ClassVar[str]
    """Name of the field that chooses."""

    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]]
    """What may be chosen -> its settings with their defaults."""

    @classmethod
    def settings_of(cls, choice: object) -> Mapping[str, Any]:
        """The settings of a choice with their defaults; none for what is no choice."""
        own = isinstance(choice, str) and ":" in choice
        return cls.CHOICES.get(OWN if own else str(choice), {})

    def settings(self) -> dict[str, Any]:
        """The settings of what was chosen."""
        return {name: getattr(self, name) for name in self.settings_of(getattr(self, self.CHOICE))}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the function that was chosen; a setting that is null is left to its default."""
        settings = self.settings()
        if "options" in settings:
            return dict(settings["options"])
        return {name: value for name, value in settings.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        settings = cls.settings_of(values.get(cls.CHOICE, cls.model_fields[cls.CHOICE].default))
        missing = {name: default for name, default in settings.items() if values.get(name) is None}
        return {**values, **{name: default for name, default in missing.items() if default is not REQUIRED}}

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        choice = getattr(self, self.CHOICE)
        settings = self.settings_of(choice)
        for name in dict.fromkeys(name for others in self.CHOICES.values() for name in others):
            value = getattr(self, name)
            if name in settings and value is None and settings[name] is REQUIRED:
                raise ValueError(f"{name} is missing: {self.CHOICE} {choice} needs it and it has no usual value")
            if name not in settings and value is not None:
                owners = [other for other, others in self.CHOICES.items() if name in others]
                raise OtherChoice(name, self.CHOICE, choice, owners)
        return self
