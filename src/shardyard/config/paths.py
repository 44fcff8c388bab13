"""Paths of a recipe: the list of their settings, absolute paths, and checks for access.

A run is resumed from anywhere, so what it records must not depend on where it was started.
"""

import difflib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from shardyard.config.data_choices import TEMPLATE_SUFFIX, is_template_file
from shardyard.config.schema.base import Section
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.config.sources import (
    DIGITS,
    is_name,
    is_pattern,
    is_remote,
    matches_of,
    split_pattern,
)
from shardyard.config.tasks import task_row
from shardyard.config.tokenizer_kinds import TOKENIZER_WORDS
from shardyard.errors import Problem, RecipeError


def is_local_source(entry: str) -> bool:
    """Whether an entry of data.source is a path, and neither a name nor an address."""
    return not is_name(entry) and not is_remote(entry)


def is_tokenizer_path(tokenizer: str) -> bool:
    """Whether data.tokenizer is a path, and neither a word nor a hub name."""
    if tokenizer in TOKENIZER_WORDS:
        return False
    return tokenizer.startswith(("/", ".", "~")) or _exists(Path(tokenizer))


@dataclass(frozen=True, kw_only=True)
class PathSetting:
    """One setting whose value is a path, or a list of paths."""

    opened_by: Literal["request", "run"] | None = None
    """request: the process that reads the recipe. run: the processes of the run, on nodes if it
    is launched. None: the path is on the nodes' own file systems; or it is launch.code, which is
    packed from the current folder.
    """
    is_made: bool = False
    """Whether the run creates the folder; any other path must exist."""
    is_folder: bool = False
    """Whether only a folder can be meant."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of the files that can be meant; empty: any."""
    may_be_address: bool = False
    """Whether the address of a remote place can be its value, too."""
    is_path: Callable[[str], bool] = lambda _: True
    """Whether a value is a path, where names can be values, too."""


_MADE = PathSetting(opened_by="run", is_made=True, is_folder=True)
_SOURCE = PathSetting(opened_by="run", may_be_address=True, is_path=is_local_source)
_OF_NODES = PathSetting()

PATHS: dict[str, PathSetting] = {
    "run.dir": PathSetting(opened_by="request", is_made=True, is_folder=True),
    "model.path": PathSetting(opened_by="run", is_folder=True),
    "model.lora.path": PathSetting(opened_by="run", is_folder=True),
    "model.dir": _MADE,
    "model.config": PathSetting(opened_by="request", suffixes=(".json",)),
    "data.source": _SOURCE,
    "data.mixture.source": _SOURCE,
    "data.mixture.eval_source": _SOURCE,
    "data.tokenizer": PathSetting(opened_by="run", is_path=is_tokenizer_path),
    "data.chat_template": PathSetting(
        opened_by="run", suffixes=(TEMPLATE_SUFFIX,), is_path=is_template_file
    ),
    "data.eval_source": _SOURCE,
    "data.eval_sets": _SOURCE,
    "data.eval_tasks": PathSetting(
        opened_by="run", suffixes=(".yaml", ".yml"), is_path=lambda text: bool(Path(text).suffix)
    ),
    "data.dir": _MADE,
    "cluster.file": PathSetting(opened_by="request", suffixes=(".yaml", ".yml")),
    "launch.run_dir": _OF_NODES,
    "launch.code": _OF_NODES,
    "launch.volumes.path": _OF_NODES,
    "launch.volumes.host": _OF_NODES,
    "launch.image_paths": _OF_NODES,
    "launch.slurm.python": PathSetting(is_path=lambda text: text != "auto"),
    "launch.ssh.hostfile": PathSetting(opened_by="request"),
    "launch.ssh.config_file": PathSetting(opened_by="request"),
    "launch.ssh.python": PathSetting(is_path=lambda text: text != "auto"),
}
"""Every setting that is a path, by its dotted name without places in lists."""


@dataclass(frozen=True, kw_only=True)
class RecipePath:
    """One path in a recipe."""

    setting: str
    """Dotted name of its setting, with the place in a list: ``data.mixture[0].source``."""
    text: str
    row: PathSetting
    is_given: bool
    """Whether the recipe gives it; else it is the default."""


def paths_of(recipe: Recipe) -> Iterator[RecipePath]:
    """Every path in a recipe, in the order of the schema."""
    return _paths_in(recipe, "", "")


def _paths_in(section: Section, name: str, prefix: str) -> Iterator[RecipePath]:
    for key in type(section).model_fields:
        content, dotted, setting = getattr(section, key), f"{name}{key}", f"{prefix}{key}"
        row = PATHS.get(dotted)
        if row is not None:
            is_given = key in section.model_fields_set
            named = content if isinstance(content, dict) else {"": content}
            for part, value in named.items():
                at = f"{setting}.{part}" if part else setting
                for text in value if isinstance(value, tuple) else (value,):
                    if isinstance(text, str) and row.is_path(text):
                        yield RecipePath(setting=at, text=text, row=row, is_given=is_given)
        elif isinstance(content, Section):
            yield from _paths_in(content, f"{dotted}.", f"{setting}.")
        elif isinstance(content, tuple):
            for place, part in enumerate(content):
                if isinstance(part, Section):
                    yield from _paths_in(part, f"{dotted}.", f"{setting}[{place}].")


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
    paths = [
        (path.setting, path.text)
        for path in paths_of(recipe)
        if path.row.opened_by == "run" and path.is_given
    ]
    for setting, place in [*paths, *secrets]:
        if not place.startswith("/"):
            text = (
                f"={place} is relative: it would start in the folder of this command, and nodes of "
                f"{node_paths.launcher} share no folder with this machine. "
                f"{_mounts_text(node_paths)} Give the whole path on them."
            )
        elif not node_paths.holds(fixed_part(place)):
            text = (
                f"={place} is in no folder that nodes of {node_paths.launcher} see. "
                f"{_mounts_text(node_paths)} Mount the volume that holds it: "
                f"{_mount_example(node_paths, place)}. Or copy the files to a folder that they "
                "see. If the image holds them, name its folder in launch.image_paths."
            )
        else:
            continue
        found.append(Problem(setting, text))
    return found


def check_local_paths(recipe: Recipe) -> list[Problem]:
    """Find every path to data or a model that this machine would read and does not have."""
    return [
        Problem(path.setting, _missing_text(path, task=recipe.task.name))
        for path in paths_of(recipe)
        if path.row.opened_by == "run"
        and not path.row.is_made
        and not is_pattern(path.text)
        and _is_missing(path.text)
    ]


def _is_missing(location: str) -> bool:
    try:
        return unreadable_reason(location) is None and not path_exists(location)
    except (RuntimeError, ValueError):  # an unknown user's home, a NUL: other checks name them
        return False


def _missing_text(path: RecipePath, *, task: str) -> str:
    if path.setting == "model.path":
        return (
            f"={path.text} does not exist. {_near_hint(path)}Give a Hugging Face folder that holds "
            "config.json, or name a hub repository with model.hub."
        )
    if path.setting == "model.lora.path":
        return (
            f"={path.text} does not exist. {_near_hint(path)}Give the folder that PEFT's "
            "save_pretrained or `shardyard export` wrote."
        )
    is_of_images = task_row(task).reads == "images"
    always = f"{DIGITS} for pictures" if is_of_images else "python-stdlib for text"
    is_source = path.setting == "data.source"
    builtin = f", or use {always} that is always there" if is_source else ""
    return (
        f"={path.text!r} does not exist (looked for {Path(path.text).expanduser().absolute()}). "
        f"{_near_hint(path)}Correct the path{builtin}."
    )


def near_path(location: str) -> str | None:
    """The path that exists in the same folder and has nearly the same name."""
    path = Path(location)
    try:
        names = os.listdir(path.expanduser().parent)  # noqa: PTH208 (names, not paths)
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    # a common suffix does not make names alike
    if near and path.suffix and not difflib.get_close_matches(path.stem, [Path(near[0]).stem]):
        return None
    return str(path.with_name(near[0])) if near else None


def check_existing_paths(recipe: Recipe, node_paths: NodePaths) -> list[Problem]:
    """Find every path that nodes would read and that is missing on the shared file system."""
    if not node_paths.shares_filesystem:
        return []
    return [
        Problem(
            path.setting,
            f"={path.text} does not exist on this machine, and the nodes of {node_paths.launcher} "
            f"read the same files. {_near_hint(path)}Correct the path, or copy the data there."
            f"{_image_paths_hint(path)}",
        )
        for path in paths_of(recipe)
        if path.row.opened_by == "run"
        and not path.row.is_made
        and not node_paths.holds(fixed_part(path.text))
        and not path_exists(path.text)
    ]


def _near_hint(path: RecipePath) -> str:
    near = near_path(path.text)
    return f"Did you mean {path.setting}={near}? " if near else ""


def _image_paths_hint(path: RecipePath) -> str:
    folder = fixed_folder(path.text)
    if not folder.startswith("/"):  # the setting takes absolute paths only
        return ""
    return f" If only the nodes have it, add its folder: launch.image_paths=[{folder}]."


def fixed_folder(entry: str) -> str:
    """The folder of a path, for a setting that names folders."""
    return str(PurePosixPath(fixed_part(entry)).parent)


def _secret_files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for name, reference in parse_references(recipe.secrets).items():
        if reference.kind == "file" and reference.name is not None:
            yield f"secrets.{name}", reference.name


def fixed_part(entry: str) -> str:
    """The literal part of a path, up to the first part that is a pattern."""
    return split_pattern(entry)[0]


def _mount_example(node_paths: NodePaths, place: str) -> str:
    top = "/".join(PurePosixPath(place).parts[:2]).replace("//", "/")
    if node_paths.mounts != "launch.volumes":
        return f"{node_paths.mounts}=['{top}:{top}']"
    kind = "efs: fs-ID" if node_paths.launcher == "aws-batch" else "claim: NAME"
    return f"launch.volumes='[{{path: {top}, {kind}}}]'"


def _mounts_text(node_paths: NodePaths) -> str:
    if not node_paths.folders:
        return "They see no folder but those of the image."
    return f"They see {', '.join(node_paths.folders)} ({node_paths.mounts}, launch.image_paths)."


def path_exists(location: str) -> bool:
    """Whether a path, or anything that a glob names, is on this machine."""
    if is_pattern(location):
        return any(True for _ in matches_of(location))
    return os.path.lexists(Path(location).expanduser())


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().exists()
    except (OSError, RuntimeError):  # RuntimeError: the home folder of an unknown user
        return False


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
    found = []
    for path in paths_of(recipe):
        place, opened_by = fixed_part(path.text), path.row.opened_by
        if opened_by == "run" and node_paths is not None:
            is_here = node_paths.shares_filesystem and not node_paths.holds(place)
        else:
            is_here = opened_by is not None
        if is_here and (why := unreadable_reason(place)) is not None:
            found.append(Problem(path.setting, f"={place} {why}"))
    return found


def unreadable_reason(location: str) -> str | None:
    """Say why the system cannot follow a path; None: it can, or the path does not exist."""
    path = Path(location).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        file = next((above for above in path.parents if _is_file(above)), path)
        return f"leads through {file}, which is a file, not a folder. Fix the path."
    except PermissionError:
        return (
            "cannot be looked at: this user may not enter a folder above it. Take another place, "
            "or let its owner give you access."
        )
    except OSError as error:
        return f"cannot be followed: {error.strerror}. Fix the path, or the link in it."
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
    return _with_absolute_paths(recipe, "")


_SectionT = TypeVar("_SectionT", bound=Section)


def _with_absolute_paths(section: _SectionT, name: str) -> _SectionT:
    changed = {}
    for key in type(section).model_fields:
        if key not in section.model_fields_set:
            continue
        content, dotted = getattr(section, key), f"{name}{key}"
        row = PATHS.get(dotted)
        if row is not None and row.opened_by is not None:
            changed[key] = _absolute(content, row)
        elif isinstance(content, Section):
            changed[key] = _with_absolute_paths(content, f"{dotted}.")
        elif isinstance(content, tuple):
            changed[key] = tuple(
                _with_absolute_paths(part, f"{dotted}.") if isinstance(part, Section) else part
                for part in content
            )
    return section.model_copy(update=changed)


def _absolute(content: Any, row: PathSetting) -> Any:
    """A setting's value with absolute paths and patterns; names and addresses stay as they are."""
    if isinstance(content, tuple):
        return tuple(_absolute(part, row) for part in content)
    if isinstance(content, dict):
        return {name: _absolute(part, row) for name, part in content.items()}
    if not isinstance(content, str) or not row.is_path(content):
        return content
    return os.path.normpath(Path.cwd() / Path(content).expanduser())
