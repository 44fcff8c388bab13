"""Base classes of all sections of a recipe, and the types of their settings."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shardyard.units import parse_count

Auto = Literal["auto"]
WhenElastic = Literal["elastic"]
"""The value depends on whether the run may change its number of nodes."""
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
Count = Annotated[int, BeforeValidator(parse_count)]
"""A whole number that may also be written with a suffix, such as ``300k`` or ``10B``."""

NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
NAME_WORDS = "a name of lower-case letters, digits and inner hyphens, at most 40 characters"


def section_key(name: str) -> str:
    """The key under which a plug-in has its settings: dotted names have no hyphens."""
    return name.replace("-", "_")


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are rejected, values never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        # a setting whose name is a word of Python, such as run.from, has it as an alias
        serialize_by_alias=True,
    )


Own = TypeVar("Own", bound=Section)


class OpenSection(Section):
    """A section in which packages have sections of their own, under the names that they add.

    Their values are kept as plain ones: ``config/validate.py`` holds them against the package's
    section, and processes that have no use for the package need not have it.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    def own(self, name: str, kind: type[Own]) -> Own:
        """The settings of a plug-in, where none is given by default.

        Args:
            name: Of the plug-in.
            kind: Its section, which the recipe's check has held them against.
        """
        return kind.model_validate(self.__pydantic_extra__.get(section_key(name), {}))
