"""Paths of a recipe: made absolute, checked for access here, and for nodes that share them.

A run is resumed from anywhere, so what it records must not depend on where it was started.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shardyard.config.globs import is_pattern, matches_of, split_pattern
from shardyard.config.schema.data import Sources
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.config.sources import is_name, is_remote
from shardyard.errors import Problem, RecipeError

# Which files the nodes of a launched run see, and the paths of a recipe that none of them has.
#
# A launcher says what its nodes see (``Launcher.sees``). What lies on a volume need not exist here.


@dataclass(frozen=True, kw_only=True)
class NodePaths:
    """View of the nodes of one launch."""

    launcher: str
    shares_filesystem: bool
    """Whether they see the files that this machine sees, by the same paths."""
    folders: tuple[str, ...] = ()
    """Absolute folders that they see and that need not exist here: on volumes, in the image."""
    opens_secrets: bool = False
    """Whether they read secrets that are kept in files, and so by paths of theirs."""
    mounts: str = "launch.volumes"
    """The setting that lets them see another folder."""

    def holds(self, location: str) -> bool:
        """Whether an absolute path lies in one of ``folders``."""
        path = PurePosixPath(os.path.normpath(location))
        return any(path.is_relative_to(os.path.normpath(folder)) for folder in self.folders)


def check_mounted_paths(recipe: Recipe, node_paths: NodePaths) -> list[Problem]:
    """Find every path that no node can have, with or without a file at it."""
    if node_paths.shares_filesystem:
        return []
    found = []
    secrets = _secret_files(recipe) if node_paths.opens_secrets else ()
    for setting, place in [*_path_settings(recipe), *secrets]:
        if not place.startswith("/"):
            text = (
                f"={place} is relative: it would start in the folder of this command, and nodes of "
                f"{node_paths.launcher} share no folder with this machine. "
                f"{_mounts_text(node_paths)} Give the whole path on them."
            )
        elif not node_paths.holds(fixed_part(place)):
            text = (
                f"={place} is in no folder that nodes of {node_paths.launcher} see. "
                f"{_mounts_text(node_paths)} Put "
                f"it there and give that path, mount what holds it with {node_paths.mounts}, or, "
                "where the image holds it, name its folder in launch.image_paths."
            )
        else:
            continue
        found.append(Problem(setting, text))
    return found


def check_existing_paths(recipe: Recipe, node_paths: NodePaths) -> list[Problem]:
    """Find every path that nodes would read and that is missing on the shared file system."""
    if not node_paths.shares_filesystem:
        return []
    return [
        Problem(
            setting,
            f"={place}: nothing is there on this machine, whose files the nodes of "
            f"{node_paths.launcher} see by the same paths. Mend the path, bring it here, or, where "
            "the nodes hold it on disks of their own, name its folder in launch.image_paths.",
        )
        for setting, place in _path_settings(recipe)
        if _is_read(setting) and not node_paths.holds(fixed_part(place)) and not path_exists(place)
    ]


def _is_read(setting: str) -> bool:
    """Whether it must be there before; the others are made."""
    return setting in ("model.path", "data.tokenizer") or setting.endswith("source")


def _secret_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for name, reference in parse_references(recipe.secrets).items():
        if reference.kind == "file" and reference.name is not None:
            yield f"secrets.{name}", reference.name


def _path_settings(recipe: Recipe) -> Iterator[tuple[str, str]]:
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


def _mounts_text(node_paths: NodePaths) -> str:
    if not node_paths.folders:
        return "They see no folder but those of the image."
    return f"They see {', '.join(node_paths.folders)} ({node_paths.mounts}, launch.image_paths)."


def path_exists(location: str) -> bool:
    """Whether a path, or anything that a glob names, is on this machine."""
    if is_pattern(location):
        return any(True for _ in matches_of(location))
    return os.path.lexists(Path(location).expanduser())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


# Paths that the system cannot follow: told by the name of the setting, before anything opens one.
#
# That nothing is there yet is no such problem: whoever needs a file says so in its own words.


def check_readable_paths(recipe: Recipe, node_paths: NodePaths | None = None) -> list[Problem]:
    """Every path of this machine in a recipe that cannot be followed.

    Args:
        node_paths: What the nodes see that open the paths; None: this machine opens them.
    """
    data, config = recipe.data, recipe.model.config
    ours = [("run.dir", recipe.run.dir), *([("model.config", config)] if config else [])]
    places = [
        ("model.path", recipe.model.path),
        ("model.dir", recipe.model.dir),
        ("data.dir", data.dir),
        *(
            (setting, fixed_part(entry))
            for setting, entry in data.entries
            if not is_name(entry) and not is_remote(entry)
        ),
    ]
    if data.tokenizer.startswith(("/", ".", "~")):  # else a hub name, or a word
        places.append(("data.tokenizer", data.tokenizer))
    if node_paths is not None:
        is_ours = node_paths.shares_filesystem
        places = [(name, at) for name, at in places if is_ours and not node_paths.holds(at or "")]
    return [
        Problem(setting, f"={place} {why}")
        for setting, place in [*ours, *places]
        if isinstance(place, str) and (why := unreadable_reason(place)) is not None
    ]


def unreadable_reason(location: str) -> str | None:
    """Say why the system cannot follow a path; None: it can, or the path does not exist."""
    path = Path(location).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        file = next((above for above in path.parents if _is_file(above)), path)
        return f"leads through {file}, which is a file and no folder. Mend the path."
    except PermissionError:
        return (
            "cannot be looked at: this user may not enter a folder above it. Take another place, "
            "or let its owner give you access."
        )
    except OSError as error:
        return f"cannot be followed: {error.strerror}. Mend the path, or what it leads to."
    return None


def make_paths_absolute(recipe: Recipe, node_paths: NodePaths | None = None) -> Recipe:
    """The recipe with its relative paths made absolute; settings that were not given stay so.

    Args:
        node_paths: What the nodes see that open the paths; None: this machine opens them.

    Raises:
        RecipeError: Paths that the system cannot follow.
    """
    unreached = check_readable_paths(recipe, node_paths)
    if unreached:
        raise RecipeError(unreached)
    for section, places in _absolute_settings(recipe).items():
        content = getattr(recipe, section)
        given = {key: value for key, value in places.items() if key in content.model_fields_set}
        if given:
            recipe = recipe.model_copy(update={section: content.model_copy(update=given)})
    return recipe


def _absolute_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    data, path, cluster_file = recipe.data, recipe.model.path, recipe.cluster.file
    config = recipe.model.config
    is_folder = Path(data.tokenizer).expanduser().exists()  # else a hub name, or a word
    return {
        "run": {"dir": _absolute(recipe.run.dir)},
        "model": {
            "path": None if path is None else _absolute(path),
            "config": _absolute(config) if isinstance(config, str) else config,
            "dir": None if recipe.model.dir is None else _absolute(recipe.model.dir),
        },
        "cluster": {"file": None if cluster_file is None else _absolute(cluster_file)},
        "data": {
            "source": _absolute_sources(data.source),
            "eval_source": _absolute_sources(data.eval_source),
            "mixture": tuple(
                share.model_copy(
                    update={
                        "source": _absolute_sources(share.source),
                        "eval_source": _absolute_sources(share.eval_source),
                    }
                )
                for share in data.mixture
            ),
            "dir": _absolute(data.dir),
            "tokenizer": _absolute(data.tokenizer) if is_folder else data.tokenizer,
        },
    }


_SourcesT = TypeVar("_SourcesT", Sources, Sources | None)


def _absolute_sources(source: _SourcesT) -> _SourcesT:
    if source is None:
        return None
    return (
        _absolute_source(source)
        if isinstance(source, str)
        else tuple(map(_absolute_source, source))
    )


def _absolute_source(entry: str) -> str:
    """A path or a pattern made absolute; an address stays as it is."""
    return entry if is_name(entry) or is_remote(entry) else _absolute(entry)


def _absolute(path: str) -> str:
    return os.path.normpath(Path.cwd() / Path(path).expanduser())
