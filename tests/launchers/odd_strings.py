"""Fifty strings that break things, and every place of a recipe that takes a text of the user's.

A place is where a string goes: a setting, an item of a list, a key of a mapping, a value of one.
"""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from shardyard.config.schema.recipe import Recipe

CANARY = "CANARY"
"""Stands for the path of a file that must never be made."""

STRINGS: tuple[str, ...] = (
    # a shell would run it
    "; touch CANARY;", "$(touch CANARY)", "`touch CANARY`", "'; touch CANARY; '",
    '"; touch CANARY; "', "a\ntouch CANARY\n", "a & touch CANARY &", "|| touch CANARY",
    "A=1; touch CANARY; B", "${X:=$(touch CANARY)}", "<(touch CANARY)", "'$(touch CANARY)'",
    # sbatch, an option parser, a glob or a path would take it for something else
    "a\n#SBATCH --wrap='touch CANARY'", "-uroot", "--export=ALL", "--help", "#", "%j-%N-%%",
    "*", "[!a]?{b,c}", "../../../../etc/passwd", "/etc/passwd", "~root/x", "~nobody-here/x", ".",
    # Kubernetes, AWS Batch, YAML or JSON would read it as something else
    "$(HOME)", "$$(HOME)$", "Ref::name", "!!python/object/apply:os.system ['touch CANARY']",
    "&a *a", "---\n...\n- a: b", "null", "yes", "1e3", "2026-01-02", "{a: [b", "a: b # c",
    # it is hard to write down, or to see
    "", " ", " a\t", "\\", "\\x41\\n", "a\r\nb", "\x1b[2J\x1b]0;a\x07", "a\x00b", "\ud800",
    "\u202eb\u2028c\x85d\ufeff", "\U0001f600\u0301\u65e5", "a" * 300, "a/" * 3000,
)  # fmt: skip

Place = tuple[str | int, ...]
"""Keys and positions down to the string; the last may be ``KEY``."""

KEY = "<key>"
"""The string is the name in a mapping."""


def places() -> list[Place]:
    """Every place in the schema, in its order."""
    return list(_places_in(Recipe, ()))


def with_string(place: Place, text: str) -> dict[str, Any]:
    """A recipe that holds the string there and nothing else."""
    content: Any = {text: "v"} if place[-1] == KEY else text
    for part in reversed(place[:-1] if place[-1] == KEY else place):
        content = [content] if isinstance(part, int) else {part: content}
    assert isinstance(content, dict)
    return content


def setting_of(place: Place) -> str:
    """The dotted name by which a refusal must call it, as far as it is a setting."""
    names = [str(part) for part in place if not isinstance(part, int) and part != KEY]
    mapping = names[:1] if names[0] == "secrets" else names
    return ".".join(mapping)


def shown(place: Place) -> str:
    """For the name of a test."""
    return ".".join(map(str, place))


def _places_in(section: type[BaseModel], above: Place) -> Iterator[Place]:
    for name, field in section.model_fields.items():
        yield from _places_of(field.annotation, (*above, name))


def _places_of(kind: Any, place: Place) -> Iterator[Place]:
    origin = get_origin(kind)
    if kind is str:
        yield place
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _places_in(kind, place)
    elif origin is Annotated:
        yield from _places_of(get_args(kind)[0], place)
    elif origin in (Union, UnionType):
        found = dict.fromkeys(p for part in get_args(kind) for p in _places_of(part, place))
        yield from found
    elif origin is tuple:
        yield from _places_of(get_args(kind)[0], (*place, 0))
    elif origin is dict:
        yield (*place, KEY)
        yield (*place, "NAME")


def filled(text: str, canary: Path) -> str:
    return text.replace(CANARY, str(canary))
