"""Plug-ins of installed packages: names of launchers, tasks, model families and data sources.

A package declares them in its metadata, as an entry point. Shardyard reads it once, when a
name is requested that is not its own. No part of a package is imported before its name is
used. An entry point is code of the package: users who install it trust it. docs/plug-ins.md
has the contracts.
"""

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardyard.errors import RequestError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

Group = Literal["launchers", "tasks", "families", "sources"]
"""A registry; the group of its entry points is ``shardyard.<group>``."""
GROUPS: tuple[Group, ...] = get_args(Group)

WORDS: dict[Group, str] = {
    "launchers": "launcher",
    "tasks": "task",
    "families": "model family",
    "sources": "data source",
}
"""Noun for a member of a group in messages."""


@dataclass(frozen=True, kw_only=True)
class PlugIn:
    """One name that an installed package adds."""

    group: Group
    name: str
    object_reference: str
    """module:object, imported when the name is used."""
    distribution: str
    version: str

    @property
    def package(self) -> str:
        """Name and version of its package, as in messages: ``letters 1.0``."""
        return f"{self.distribution} {self.version}"

    def to_json(self) -> dict[str, str]:
        """Return the entry of manifest.json: without the place, which depends on the version."""
        return {
            "group": self.group,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
        }

    @property
    def what(self) -> str:
        """``the task 'vowels' of letters 1.0``."""
        return f"the {WORDS[self.group]} {self.name!r} of {self.package}"


def installed(group: Group) -> dict[str, tuple[PlugIn, ...]]:
    """Every name that packages add to a registry, with all that claim it."""
    return _claims()[0][group]


def unreadable() -> list[str]:
    """Packages that say something of Shardyard in metadata that cannot be read."""
    return list(_claims()[1])


def plug_in_named(group: Group, name: str) -> PlugIn | None:
    """The one plug-in of a name; None: no installed package adds it.

    Raises:
        RequestError: Several packages add it.
    """
    found = installed(group).get(name, ())
    if len(found) > 1:
        raise RequestError(_duplicate_message(found))
    return found[0] if found else None


def load_entry_point(
    group: Group, name: str, *, builtin: Collection[str], validate: Callable[[Any], str]
) -> Any:
    """Import and return the target of the entry point of a name that is not our own.

    Args:
        builtin: Our own names, which no package can take over.
        validate: In what way an object is not what the registry holds; empty: it is.

    Raises:
        RequestError: No package adds the name, several do, or what it adds cannot be used.
    """
    plug_in = plug_in_named(group, name)
    if plug_in is None:
        raise RequestError(unknown_name_message(group, name, builtin))
    content = load_object(plug_in, plug_in.object_reference)
    why = validate(content)
    if why:
        raise RequestError(
            f"{plug_in.what} ({plug_in.object_reference}) {why}. {_fix_hint(plug_in)}"
        )
    return content


def raised_by(error: BaseException) -> PlugIn | None:
    """Return the plug-in whose code raised an error. None if ours did, or code deeper down.

    An error of a library that both call is attributed to the last caller.
    """
    own = {
        plug_in.object_reference.partition(":")[0].partition(".")[0]: plug_in
        for group in GROUPS
        for claims in installed(group).values()
        for plug_in in claims
    }
    match: PlugIn | None = None
    for frame, _ in walk_tb(error.__traceback__):
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root == "shardyard":
            match = None
        elif root in own:
            match = own[root]
    return match


def load_object(plug_in: PlugIn | None, object_reference: str) -> Any:
    """Import and return the object of ``module:object``.

    Args:
        plug_in: Plug-in that owns it; None: our own.

    Raises:
        RequestError: A package's cannot be imported.
    """
    module, _, name = object_reference.partition(":")
    if plug_in is None:
        return getattr(import_module(module), name)
    try:
        content = import_module(module)
        for attribute in name.split("."):
            content = getattr(content, attribute)
    except (Exception, SystemExit) as error:  # whatever a foreign module does while it is imported
        raise RequestError(
            f"{plug_in.what} cannot be loaded from {object_reference}: {type(error).__name__}: "
            f"{error}. {_fix_hint(plug_in)}"
        ) from error
    return content


def unknown_name_message(group: Group, name: str, builtin: Collection[str]) -> str:
    """Report an unknown name, with the nearest one and all available names."""
    others = [f"{other} ({found[0].package})" for other, found in installed(group).items()]
    near = difflib.get_close_matches(name, [*builtin, *installed(group)], n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return (
        f"unknown {WORDS[group]} {name!r}. {hint}Available: {', '.join([*builtin, *others])}. "
        "Install a package to add another."
    )


def check_plug_in_claims(group: Group, builtin: Collection[str]) -> Iterator[str]:
    """Yield the names that packages claim and cannot have; each is reported when all are listed."""
    for name, found in installed(group).items():
        if name in builtin:
            for plug_in in found:
                hint = _fix_hint(plug_in)
                yield f"{plug_in.what} is not used: the name is Shardyard's own. {hint}"
        elif len(found) > 1:
            yield _duplicate_message(found)


def _duplicate_message(claimants: Collection[PlugIn]) -> str:
    first, *_ = claimants
    packages = " and by ".join(sorted(plug_in.package for plug_in in claimants))
    return (
        f"the {WORDS[first.group]} {first.name!r} is added by {packages}, and which one is meant "
        "cannot be known. Uninstall all but one of them."
    )


def _fix_hint(plug_in: PlugIn) -> str:
    return f"Fix, update or uninstall {plug_in.distribution}; no other part needs it."


@cache
def _claims() -> tuple[dict[Group, dict[str, tuple[PlugIn, ...]]], tuple[str, ...]]:
    """All plug-ins by group and name, and what could not be read."""
    from configparser import ConfigParser, Error  # most commands never come here
    from importlib.metadata import distributions

    claims: dict[Group, dict[str, tuple[PlugIn, ...]]] = {group: {} for group in GROUPS}
    broken, seen = [], set()
    for distribution in distributions():
        text = _entry_points(distribution)
        if "shardyard." not in text:  # nearly all: neither parsed nor asked for their names
            continue
        name = distribution.metadata["Name"]
        if name in seen:  # another version, later on the path: it is not imported either
            continue
        seen.add(name)
        parser = ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
        try:
            parser.read_string(text)
        except Error as error:
            broken.append(
                f"the entry points of {name} {distribution.version} cannot be read: "
                f"{' '.join(str(error).split())}. Update or uninstall {name}."
            )
            continue
        for group in GROUPS:
            section = f"shardyard.{group}"
            for key, place in parser[section].items() if section in parser else ():
                plug_in = PlugIn(
                    group=group, name=key, object_reference=place.partition("[")[0].strip(),
                    distribution=name, version=distribution.version,
                )  # fmt: skip
                claims[group][key] = (*claims[group].get(key, ()), plug_in)
    return claims, tuple(broken)


def _entry_points(distribution: "Distribution") -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, ValueError):  # not ours to complain about
        return ""
