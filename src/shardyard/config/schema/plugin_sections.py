"""Sections of a recipe that packages add: their owners and their content.

A launcher has ``launch.<name>``, a task ``task.<name>``. The object of an entry point has
the section as its ``settings``: a class made from ``config.schema.Section``, with bounds as
ours have.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from shardyard.config.schema.base import Section as Settings
from shardyard.config.schema.base import section_key
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import SettingSection, section_of, sections
from shardyard.errors import RequestError
from shardyard.plugins import Group, PlugIn, installed, load_object, plug_in_named

SECTIONS: Mapping[str, Group] = {"launch": "launchers", "task": "tasks"}
"""Section that takes those of packages -> which ones."""


def plug_in_at(path: str) -> PlugIn | None:
    """The plug-in that a section of a section belongs to; None: no package's.

    Args:
        path: ``launch.slurm``, ``task.vowels``.

    Raises:
        RequestError: Several packages claim it.
    """
    section, _, key = path.partition(".")
    group = SECTIONS.get(section)
    if group is None or not key or "." in key or key in _own_keys(section):
        return None
    names = [name for name in installed(group) if section_key(name) == key]
    return plug_in_named(group, names[0]) if names else None


@cache
def settings_class_at(path: str) -> type[Settings] | None:
    """The typed section of a plug-in; None: there is none, or it has no settings.

    Raises:
        RequestError: The package cannot be used.
    """
    plug_in = plug_in_at(path)
    return None if plug_in is None else _settings_of(plug_in)


def _settings_of(plug_in: PlugIn) -> type[Settings] | None:
    kind = getattr(load_object(plug_in, plug_in.object_reference), "settings", None)
    if kind is None or (isinstance(kind, type) and issubclass(kind, Settings)):
        return kind
    raise RequestError(
        f"{plug_in.what} has settings={kind!r}, which is not a subclass of "
        f"shardyard.config.schema.recipe.Section. Fix, update or uninstall {plug_in.distribution}."
    )


@cache
def described_at(path: str) -> SettingSection | None:
    """A plug-in's section as ``config --schema`` shows it; raises as ``settings_class_at``."""
    kind = settings_class_at(path)
    return None if kind is None else section_of(path, kind)


def described() -> Iterator[tuple[PlugIn, SettingSection | str]]:
    """Every section that packages add, or in one message why there is none. Imports them all."""
    for section, group in SECTIONS.items():
        for name, claims in installed(group).items():
            path = f"{section}.{section_key(name)}"
            try:
                found = described_at(path)
                hidden = section_key(name) in _own_keys(section) and _settings_of(claims[0])
            except RequestError as error:
                yield claims[0], str(error)
                continue
            if found is not None:
                yield claims[0], found
            elif hidden:
                text = (
                    f"{claims[0].what} has settings that cannot be given: {path} is Shardyard's "
                    "own."
                )
                yield claims[0], f"{text} Its authors have to choose another name."


def recipe_with_defaults(recipe: Recipe) -> Recipe:
    """With every setting of the plug-ins that a run reads, so that they are written down."""
    path = f"task.{section_key(recipe.task.name)}"
    kind = settings_class_at(path)
    if kind is None:
        return recipe
    settings = recipe.task.own(recipe.task.name, kind).model_dump(mode="json")
    task = recipe.task.model_copy(update={path.partition(".")[2]: settings})
    return recipe.model_copy(update={"task": task})


@cache
def _own_keys(section: str) -> frozenset[str]:
    names = next(found.settings for found in sections() if found.name == section)
    return frozenset(setting.name.split(".")[1] for setting in names)
