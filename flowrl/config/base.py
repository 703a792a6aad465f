"""The base of every config class, and the types that several of them share."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flowrl.config.errors import UserError


class ConfigError(UserError):
    """A config file or a `key=value` that says nothing legal. One sentence: where, what, what is allowed, the fix."""


class Config(BaseModel):
    """A frozen group of settings. A string under each field says its unit and its effect."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def check_import(name: str) -> str:
    """The name again, if it has the form module:name; what it names is not looked for."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ValueError(f"{name!r} is not of the form module:name, like flowrl.rewards.final_number:score")
    return name


# Strict mode refuses "3" for 3 and true for 1. YAML has neither paths nor tuples: these are read from text and lists.
FilePath = Annotated[Path, Field(strict=False)]
TokenIds = Annotated[tuple[int, ...], Field(strict=False)]
ImportName = Annotated[str, AfterValidator(check_import)]

Device = Literal["auto", "cpu", "cuda"]
