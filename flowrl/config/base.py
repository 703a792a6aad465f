"""The base class of all settings, and the field types that several of them share."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flowrl.config.imports import check_import_name
from flowrl.config.user_errors import UserError


class ConfigError(UserError):
    """A config file or a `key=value` override is invalid. The message names the file, the line and the fix."""


class Config(BaseModel):
    """A frozen group of settings. The docstring of each field states its unit and its effect."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Copies the docstring of a field to a subclass that redefines the field without one."""
        inherited = getattr(cls.__mro__[1], "model_fields", {})
        for name in cls.model_fields.keys() & inherited.keys():
            cls.model_fields[name].description = cls.model_fields[name].description or inherited[name].description


# Strict mode rejects "3" for 3 and true for 1. YAML has neither paths nor tuples, so these types accept text and lists.
FilePath = Annotated[Path, Field(strict=False)]
TokenIds = Annotated[tuple[int, ...], Field(strict=False)]
ImportName = Annotated[str, AfterValidator(check_import_name)]

Device = Literal["auto", "cpu", "cuda"]
