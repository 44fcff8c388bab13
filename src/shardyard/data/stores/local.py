"""Files, folders and globs of this machine, and the interpreter's own source code."""

import os
import stat
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NoReturn

from shardyard.config.sources import escape_hint, matches_of, split_pattern
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import COMPILED, ListedFile
from shardyard.errors import RequestError
from shardyard.file_faults import broken_link_error

PYTHON_STDLIB = "python-stdlib"
_SKIPPED_STDLIB_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class LocalStore:
    """Store of this machine's file system."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:
        """Find files, as defined by ``Store``."""
        if entry == PYTHON_STDLIB:
            for path, name in _stdlib_files():
                yield replace(_stat_file(path, name), below="")
            return
        folder, pattern = _split(entry)
        if pattern:
            yield from _matches(entry, folder, pattern)
            return
        for path, name in _expand(entry, own):
            yield _stat_file(path, name)

    def open(self, file: SourceFile) -> BinaryIO:
        """Open a file, as ``Store`` defines; changes meanwhile show when files are listed again."""
        return Path(file.path).open("rb")


def _stat_file(path: Path, name: str) -> ListedFile:
    """A regular file, by its one path.

    Raises:
        RequestError: It is none, or cannot be looked at.
    """
    try:
        status = path.stat()
        key = str(path.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise _stat_error(path, error) from error
    for is_kind, kind in _IRREGULAR:
        if is_kind(status.st_mode):
            raise RequestError(
                f"data.source: {escape_text(str(path))} is {kind}, and text is read more than once "
                "and by several processes. Write its content into a file and name that."
            )
    return ListedFile(key, name, status.st_size, status.st_mtime_ns)


_IRREGULAR = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def _stat_error(path: Path, error: Exception) -> RequestError:
    link = broken_link_error(path)
    if link is not None:
        return RequestError(f"data.source: {escape_text(str(path))} {link}")
    why = error.strerror if isinstance(error, OSError) else str(error)
    text = escape_text(str(path))
    return RequestError(
        f"data.source: {text if len(text) <= 200 else f'{text[:200]}...'} cannot be looked at: "
        f"{why}. Correct the path, or take it away."
    )


def _split(entry: str) -> tuple[str, str]:
    try:
        return split_pattern(entry)
    except RuntimeError as error:  # ~ of an unknown user
        raise _stat_error(Path(entry), error) from error


def _matches(entry: str, folder: str, pattern: str) -> Iterator[ListedFile]:
    """Files that a pattern names, sorted.

    Raises:
        RequestError: There is none.
    """
    files = [match for match in sorted(matches_of(entry)) if not Path(match).is_dir()]
    if not files:
        raise RequestError(
            f"data.source={escape_text(entry)!r}: no file matches {escape_text(pattern)!r} in "
            f"{escape_text(folder)}. Correct the pattern, or take it out.{escape_hint(pattern)}"
        )
    for match in files:
        below = os.path.relpath(match, folder)
        yield replace(_stat_file(Path(match), match), below=below, pattern=pattern)


def _expand(entry: str, own: Collection[Path]) -> Iterator[tuple[Path, str]]:
    path = Path(entry)
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if not is_missing or path.is_symlink():
            raise _stat_error(path, error) from error
        raise RequestError(
            f"data.source={entry!r} does not exist (looked for {path.absolute()}). "
            f"Correct the path, or use {PYTHON_STDLIB} for text that is always there."
        ) from error
    if stat.S_ISDIR(mode):
        yield from _folder_files(path, skipped={COMPILED}, own=own, follows_links=True)
    else:
        yield path, path.name


def _folder_files(
    folder: Path,
    *,
    skipped: Collection[str],
    own: Collection[Path] = (),
    follows_links: bool = False,
) -> Iterator[tuple[Path, str]]:
    """Files below a folder, sorted by name; hidden files and folders (.git, .venv) are left out."""
    named: list[tuple[str, Path]] = []
    seen = {os.path.realpath(place) for place in own}

    def raise_error(error: OSError) -> NoReturn:
        raise _stat_error(Path(str(error.filename)), error) from error

    for parent, folders, names in os.walk(folder, onerror=raise_error, followlinks=follows_links):
        real = os.path.realpath(parent)
        if real in seen:  # ours, or one that a link leads to again
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skipped)
        paths = [Path(parent, name) for name in names if name[0] != "."]
        named += [(path.relative_to(folder).as_posix(), path) for path in paths]
    for name, path in sorted(named):
        yield path, name


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    """The interpreter's own .py files, 12 MB in Python 3.11, without its tests.

    Tests are 60 % of the bytes, some are not UTF-8 on purpose, and Linux distributions leave them
    out: without them the corpus is much the same everywhere and prepared in seconds.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    for path, name in _folder_files(folder, skipped=_SKIPPED_STDLIB_FOLDERS):
        if path.suffix == ".py" and path.is_file() and _is_utf8(path):
            yield path, name


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
