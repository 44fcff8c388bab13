"""Checks of a recipe's paths on a node: do they exist, are they readable and writable.

This runs on a node before a training (`shardyard doctor --probe`). The user's rights are tried,
not read from modes, because a claim, an export and a container each affect them.
"""

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shardyard.config.inspection import inspect_folder
from shardyard.config.model.source import (
    config_content,
    model_folder,
    network_or_none,
    shape_or_none,
)
from shardyard.config.paths import RecipePath, paths_of
from shardyard.config.rules.custom_module import generic_type
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_pattern, matches_of
from shardyard.doctor.finding import Finding
from shardyard.doctor.storage import GIB, checkpoint_space, nearest_folder
from shardyard.errors import ShardyardError
from shardyard.file_faults import broken_link_error, content_error
from shardyard.units import format_bytes

_NEVER_EMPTY = (".safetensors", ".json", ".parquet", ".gz", ".bz2", ".zst", ".h5", ".tar", ".tgz")
"""Suffixes of files that hold something."""
_MOST_FILES = 1000
"""Files of one place that are opened: more would take long on a busy file system."""


def check_paths(
    recipe: Recipe, runs: Path, *, checkpoint_bytes: int | None, mounts: Iterable[str] = ()
) -> list[Finding]:
    """Check every path of a recipe as the user of this process; leaves no files behind.

    Args:
        recipe: As this node reads it, data.dir settled.
        runs: Parent of the run's folder, as this node sees it.
        checkpoint_bytes: Bytes of one checkpoint; None: not known.
        mounts: Folders where something ought to be mounted.
    """
    paths = [path for path in paths_of(recipe) if path.row.opened_by == "run"]
    found = [*_mounts(mounts)]
    found += [_reading(recipe, path) for path in paths if not path.row.is_made]
    where = "run.dir" if recipe.launch.run_dir is None else "launch.run_dir"
    made = {path.setting: Path(path.text) for path in paths if path.row.is_made}
    if recipe.model.hub is not None:
        made.setdefault("model.dir", runs / "models")
    found += [_writing(setting, place) for setting, place in {where: runs, **made}.items()]
    return [*found, _space_finding(where, runs, recipe, checkpoint_bytes)]


def _mounts(mounts: Iterable[str]) -> Iterator[Finding]:
    for mount in mounts:
        if not Path(mount).is_dir():
            yield Finding(
                name="launch.volumes", verdict="problem",
                what=f"{mount}: no volume is mounted there on {os.uname().nodename}",
                mend="Fix launch.volumes (on Slurm launch.slurm.container_mounts).",
            )  # fmt: skip


def _reading(recipe: Recipe, path: RecipePath) -> Finding:
    match path.setting:
        case "model.path":
            return _model(recipe, path.text)
        case "data.tokenizer":
            return _tokenizer(path.text)
        case _:
            return _source(path.setting, path.text)


def _model(recipe: Recipe, location: str) -> Finding:
    """A folder with config.json that the recipe's words fit, and weights that can be opened."""
    opened = _files("model.path", location)
    if opened.verdict == "ok":
        try:
            _inspect(recipe, model_folder(recipe.model))
        except ShardyardError as error:
            return Finding(name="model.path", verdict="problem", what=str(error))
    return opened


def _inspect(recipe: Recipe, folder: Path | None) -> None:
    """Read a model's shape and compare its weights with it.

    Raises:
        ShardyardError: The folder does not hold the model that the recipe and config.json say.
    """
    if folder is None:
        return
    network_or_none(recipe, folder)
    config = folder / "config.json"
    task = recipe.task.name
    is_generic = config.is_file() and generic_type(
        config_content(str(config)), str(config), task=task
    )
    shape = None if is_generic else shape_or_none(recipe, folder, recipe.data.vocab_size)
    inspect_folder(recipe, folder, shape)


def check_data_sources(recipe: Recipe) -> list[Finding]:
    """Files of data.source on this machine that cannot be read, or hold something else.

    Remote places are tried by the preparation, before any work.
    """
    sources = (path for path in paths_of(recipe) if path.row.may_be_address)
    found = [_source(path.setting, path.text) for path in sources]
    return [finding for finding in found if finding.verdict == "problem"]


def _source(setting: str, location: str) -> Finding:
    if is_pattern(location):
        return _opened(setting, location, map(Path, matches_of(location)))
    return _files(setting, location)


def _files(setting: str, location: str) -> Finding:
    """Try to read a file, or all files of a folder."""
    path = Path(location)
    why = _unreadable_reason(path)
    if why is not None:
        return _unreadable(setting, location, why)
    return _opened(setting, location, _below(path) if path.is_dir() else (path,))


def _tokenizer(location: str) -> Finding:
    file = Path(location)
    if not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises where it may not look
        names = ("tokenizer.json", "vocab.txt")
        file /= next((name for name in names if os.path.lexists(file / name)), names[0])
    why = _unreadable_reason(file)
    if why is not None:
        return _unreadable("data.tokenizer", str(file), why)
    return Finding(name="data.tokenizer", verdict="ok", what=f"{file} can be read")


def _opened(setting: str, location: str, paths: Iterable[Path]) -> Finding:
    """Open what is there, as far as it is files, and list what is folders."""
    count = 0
    for path in islice(paths, _MOST_FILES):
        why = _unreadable_reason(path)
        if why is not None:
            return _unreadable(setting, location, f"{path}: {why}")
        count += not path.is_dir()
    if not count:
        return _unreadable(setting, location, "it has no file in it")
    most = " or more" if count >= _MOST_FILES else ""
    what = f"{location}: {count}{most} file{'s' * (count > 1)} can be read"
    return Finding(name=setting, verdict="ok", what=what)


def _below(folder: Path) -> Iterator[Path]:
    """All that is in a folder; one that cannot be listed comes as itself."""
    yield folder
    for root, folders, files in os.walk(folder):
        yield from (Path(root) / name for name in (*files, *folders))


def _unreadable(setting: str, location: str, reason: str) -> Finding:
    what = f"={location}: {reason}" if location not in reason else f"={reason}"
    return Finding(
        name=setting, verdict="problem", what=f"{setting}{what}, as {_user()}",
        mend="Bring it there, give another path, or let its owner open it to this user.",
    )  # fmt: skip


def _unreadable_reason(path: Path) -> str | None:
    """Why this user cannot read a file or list a folder; None: it can."""
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with path.open("rb") as file:
                file.read(1)
        return content_error(path, is_text=path.suffix not in _NEVER_EMPTY)
    except FileNotFoundError:
        return broken_link_error(path) or "it does not exist"
    except NotADirectoryError:
        return "it leads through a file"
    except PermissionError:
        return "it may not be read"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _writing(setting: str, folder: Path) -> Finding:
    """Write a small file, flush it, rename it, remove it; where the folder will be made."""
    there = next((at for at in (folder, *folder.parents) if os.path.lexists(at)), folder)
    where = f"{folder}" if there == folder else f"{folder} (to be made in {there})"
    if not there.is_dir():
        return Finding(
            name=setting, verdict="problem", what=f"{setting}={folder}: {there} is not a folder",
            mend=f"Choose another place with {setting}, or move the file away.",
        )  # fmt: skip
    first, second = (there / f".shardyard-{secrets.token_hex(8)}" for _ in range(2))
    try:
        with first.open("xb") as file:
            file.write(b"shardyard" * 64)
            file.flush()
            os.fsync(file.fileno())
        first.rename(second)
        second.unlink()
    except OSError as error:
        return _unwritable(setting, where, there, error)
    finally:
        for left in (first, second):
            with suppress(OSError):
                left.unlink()
    return Finding(name=setting, verdict="ok", what=f"{where} can be written by {_user()}")


def _unwritable(setting: str, where: str, existing: Path, error: OSError) -> Finding:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why, mend = "it is full", f"Free some room, or choose another place with {setting}."
    elif error.errno == errno.EROFS:
        why, mend = (
            "it is mounted to be read only",
            "Mount it writable: what a run makes lies there.",
        )
    elif error.errno in (errno.EACCES, errno.EPERM):
        state = existing.stat()
        why = (
            f"{_user()} may not write there; it belongs to user {state.st_uid} and group "
            f"{state.st_gid}, mode {state.st_mode & 0o7777:04o}"
        )
        mend = f"chown it to {os.geteuid()}:{os.getegid()}, or open it to one of the groups."
    else:
        why, mend = f"it cannot be written: {error.strerror}", f"Fix it, or change {setting}."
    return Finding(name=setting, verdict="problem", what=f"{setting}={where}: {why}", mend=mend)


def _space_finding(
    setting: str, runs: Path, recipe: Recipe, checkpoint_bytes: int | None
) -> Finding:
    there = nearest_folder(runs)
    try:
        room = checkpoint_space(there, recipe.checkpoint, checkpoint_bytes=checkpoint_bytes)
    except OSError as error:
        what = f"room on {there} is not known: {error.strerror}"
        return Finding(name="room", verdict="warning", what=what, mend="See that it is mounted.")
    if room is None:
        return Finding(name="room", verdict="ok", what=f"{there} counts no room")
    what = f"{there}: {format_bytes(room.free_bytes)} free"
    if room.words:
        what += f", and {room.words}"
    if room.is_short or room.free_bytes < GIB:
        return Finding(
            name="room", verdict="problem", what=what,
            mend=f"Free some, choose another place with {setting}, or lower checkpoint.keep_last.",
        )  # fmt: skip
    return Finding(name="room", verdict="ok", what=what)


def _user() -> str:
    return f"user {os.geteuid()}, group {os.getegid()}"
