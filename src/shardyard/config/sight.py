"""Which files the nodes of a launched run see, and the paths of a recipe that none of them has.

A launcher says what its nodes see (``Launcher.sees``). What lies on a volume need not exist here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardyard.config.globs import is_pattern, matches_of, split_pattern
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secret_reference import parse_references
from shardyard.config.sources import is_name, is_remote
from shardyard.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What the nodes of one launch see."""

    launcher: str
    sees_this_machine: bool
    """Whether they see the files that this machine sees, by the same paths."""
    folders: tuple[str, ...] = ()
    """Absolute folders that they see and that need not exist here: on volumes, in the image."""
    opens_secrets: bool = False
    """Whether they read secrets that are kept in files, and so by paths of theirs."""
    mounts: str = "launch.volumes"
    """The setting that lets them see another folder."""

    def holds(self, place: str) -> bool:
        """Whether an absolute path lies in one of ``folders``."""
        path = PurePosixPath(os.path.normpath(place))
        return any(path.is_relative_to(os.path.normpath(folder)) for folder in self.folders)


def unseen_problems(recipe: Recipe, sight: Sight) -> list[Problem]:
    """Every path that no node can have, whatever is there."""
    if sight.sees_this_machine:
        return []
    found = []
    secrets = _secret_files(recipe) if sight.opens_secrets else ()
    for setting, place in [*_places(recipe), *secrets]:
        if not place.startswith("/"):
            text = (
                f"={place} is relative: it would start in the folder of this command, and nodes of "
                f"{sight.launcher} share no folder with this machine. {_seen(sight)} Give the "
                "whole path on them."
            )
        elif not sight.holds(fixed_part(place)):
            text = (
                f"={place} is in no folder that nodes of {sight.launcher} see. {_seen(sight)} Put "
                f"it there and give that path, mount what holds it with {sight.mounts}, or, where "
                "the image holds it, name its folder in launch.image_paths."
            )
        else:
            continue
        found.append(Problem(setting, text))
    return found


def absent_problems(recipe: Recipe, sight: Sight) -> list[Problem]:
    """Every path that nodes would read, and where nothing is on the file system that we share."""
    if not sight.sees_this_machine:
        return []
    return [
        Problem(
            setting,
            f"={place}: nothing is there on this machine, whose files the nodes of "
            f"{sight.launcher} see by the same paths. Mend the path, bring it here, or, where the "
            "nodes hold it on disks of their own, name its folder in launch.image_paths.",
        )
        for setting, place in _places(recipe)
        if _is_read(setting) and not sight.holds(fixed_part(place)) and not is_there(place)
    ]


def _is_read(setting: str) -> bool:
    """Whether it must be there before; the others are made."""
    return setting in ("model.path", "data.tokenizer") or setting.endswith("source")


def _secret_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for name, reference in parse_references(recipe.secrets).items():
        if reference.kind == "file" and reference.name is not None:
            yield f"secrets.{name}", reference.name


def _places(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every path of a recipe that nodes open, by the name of its setting."""
    data, model = recipe.data, recipe.model
    if model.path is not None:
        yield "model.path", model.path
    if model.dir is not None:
        yield "model.dir", model.dir
    for setting, entry in data.entries:
        if not is_name(entry) and not is_remote(entry):  # nodes reach that as this machine does
            yield setting, entry
    if "dir" in data.model_fields_set:
        yield "data.dir", data.dir
    if is_folder(data.tokenizer):
        yield "data.tokenizer", data.tokenizer


def is_folder(tokenizer: str) -> bool:
    """Whether a tokenizer is given by its folder, and not by a hub name or a word."""
    return tokenizer.startswith(("/", ".", "~")) or _is_file(Path(tokenizer) / "tokenizer.json")


def fixed_part(entry: str) -> str:
    """The literal part of a path, up to the first part that is a pattern."""
    return split_pattern(entry)[0]


def _seen(sight: Sight) -> str:
    if not sight.folders:
        return "They see no folder but those of the image."
    return f"They see {', '.join(sight.folders)} ({sight.mounts}, launch.image_paths)."


def is_there(place: str) -> bool:
    """Whether a path, or anything that a glob names, is on this machine."""
    if is_pattern(place):
        return any(True for _ in matches_of(place))
    return os.path.lexists(Path(place).expanduser())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
