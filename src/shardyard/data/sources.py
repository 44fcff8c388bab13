"""Where text comes from: which files there are, and how they are cut into pieces of equal work.

A piece is the unit of parallel and resumable work. Cutting needs sizes only: a range of bytes
stands for the lines that begin in it, so no file is read before its turn and a single huge file is
shared by all workers. How a file is read is said in ``formats.py``.
"""

import glob
import os
import stat
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardyard.data.formats import (
    FORMATS,
    SECTION_BYTES,
    Section,
    Span,
    format_of,
    remedy_of,
    shown,
)
from shardyard.errors import RequestError, SourceError

PYTHON_STDLIB = "python-stdlib"
_SKIPPED_STDLIB_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_COMPILED = "__pycache__"
"""What Python leaves beside source code: left out of folders, as hidden files are."""
_SHOWN_FILES = 4


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus as it was when it was listed."""

    path: str
    name: str
    """Path below the source that named it."""
    format: str
    """A key of ``FORMATS``."""
    size_bytes: int
    mtime_ns: int


Piece = tuple[Span, ...]


def list_files(
    source: str | Sequence[str], data_format: str = "by_suffix", *, own: Collection[Path] = ()
) -> list[SourceFile]:
    """All files of ``data.source`` in a fixed order, none twice.

    Args:
        data_format: ``data.format``.
        own: Folders of ours (prepared data, runs): left out of a folder that they lie in.

    Raises:
        RequestError: A path does not exist, nothing was found, or something that was is not read.
        SourceError: All files are empty.
    """
    entries = [source] if isinstance(source, str) else list(source)
    found: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    for entry in entries:
        for path, name in _expand(entry, own):
            key, status = _look_at(path)
            format = format_of(path.name, data_format)
            if format is None:
                unread[key] = name
            elif key not in found:
                found[key] = SourceFile(key, name, format, status.st_size, status.st_mtime_ns)
    if unread:
        _refuse_kinds(source, list(unread.values()), len(found) + len(unread))
    if not found:
        raise RequestError(
            f"data.source={source!r} names no file. Give a folder, file or glob that holds "
            f"{_READ_KINDS}; hidden files in folders are left out."
        )
    files = list(found.values())
    if not any(file.size_bytes for file in files):
        its = "its only file holds" if len(files) == 1 else f"its {len(files)} files hold"
        raise SourceError(
            f"data.source={source!r} is an empty corpus: {its} no text. Give files with text."
        )
    return files


_READ_KINDS = "text or source code (.txt, .md, .py and the like), .jsonl, .ndjson or .json"


def _refuse_kinds(source: str | Sequence[str], names: Sequence[str], num_files: int) -> NoReturn:
    named = ", ".join(shown(name) for name in names[:_SHOWN_FILES])
    more = f", and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    suffixes: dict[str, str] = {}
    for name in names:
        suffixes.setdefault(remedy_of(name), shown(Path(name).suffix) or "no suffix")
    remedies = "; ".join(f"{suffix}: {remedy}" for remedy, suffix in suffixes.items())
    raise RequestError(
        f"data.source={source!r}: {len(names)} of its {num_files} files are of no kind that is "
        f"read, which is {_READ_KINDS}: {named}{more}. What to do, by suffix: {remedies}. "
        "To leave files of a folder out, name the others by a glob, such as 'FOLDER/**/*.md'."
    )


def _look_at(path: Path) -> tuple[str, os.stat_result]:
    """The one path of a regular file, and its status.

    Raises:
        RequestError: It is none, or cannot be looked at.
    """
    try:
        status = path.stat()
        key = str(path.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise _cannot_look_at(path, error) from error
    for is_kind, kind in _IRREGULAR:
        if is_kind(status.st_mode):
            raise RequestError(
                f"data.source: {shown(str(path))} is {kind}, and text is read more than once and "
                "by several processes. Write its content into a file and name that."
            )
    return key, status


_IRREGULAR = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def _cannot_look_at(path: Path, error: Exception) -> RequestError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    text = shown(str(path))
    return RequestError(
        f"data.source: {text if len(text) <= 200 else f'{text[:200]}...'} cannot be looked at: "
        f"{why}. Correct the path, or take it away."
    )


def _expand(entry: str, own: Collection[Path]) -> Iterator[tuple[Path, str]]:
    if entry == PYTHON_STDLIB:
        yield from _stdlib_files()
        return
    path = Path(entry)
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        if glob.has_magic(entry):
            for match in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 (absolute)
                if not Path(match).is_dir():
                    yield Path(match), match
            return
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _cannot_look_at(path, error) from error
        raise RequestError(
            f"data.source={entry!r} does not exist (looked for {path.absolute()}). "
            f"Correct the path, or use {PYTHON_STDLIB} for text that is always there."
        ) from error
    if stat.S_ISDIR(mode):
        yield from _folder_files(path, skipped={_COMPILED}, own=own, follows_links=True)
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

    def refuse(error: OSError) -> NoReturn:
        raise _cannot_look_at(Path(str(error.filename)), error) from error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=follows_links):
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


def refuse_unreadable(files: Sequence[SourceFile], text_key: str) -> None:
    """Read the beginning of every file: a wrong key or encoding is told before any work is done.

    Raises:
        SourceError: Names the first few files whose beginning cannot be read, and why.
    """
    wrong: list[str] = []
    for file in files:
        stop = file.size_bytes
        if FORMATS[file.format].is_divisible:
            stop = min(stop, SECTION_BYTES)
        beginning = Span(file.path, file.format, 0, stop, is_last=False)
        try:
            next(read_sections((beginning,), text_key), None)
        except SourceError as error:
            wrong.append(str(error))
    if wrong:
        more = f"\nand {len(wrong) - _SHOWN_FILES} files more" if len(wrong) > _SHOWN_FILES else ""
        raise SourceError("\n".join(wrong[:_SHOWN_FILES]) + more)


def split_into_pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[Piece]:
    """Cut a corpus into pieces of ``piece_bytes`` to twice that, in order; the last may be less,
    and one with a file that cannot be divided more.

    Args:
        piece_bytes: A multiple of ``SECTION_BYTES``, so that no section is cut in two.
    """
    assert piece_bytes % SECTION_BYTES == 0, piece_bytes
    pieces: list[Piece] = []
    spans: list[Span] = []
    filled_bytes = 0
    for file in files:
        span_bytes = piece_bytes if FORMATS[file.format].is_divisible else max(file.size_bytes, 1)
        for start in range(0, file.size_bytes, span_bytes):
            stop = min(start + span_bytes, file.size_bytes)
            spans.append(Span(file.path, file.format, start, stop, stop == file.size_bytes))
            filled_bytes += stop - start
            if filled_bytes >= piece_bytes:
                pieces.append(tuple(spans))
                spans, filled_bytes = [], 0
    if spans:
        pieces.append(tuple(spans))
    return pieces


def piece_size_bytes(piece: Piece) -> int:
    """Bytes of source text in a piece, up to the length of a line."""
    return sum(span.stop - span.start for span in piece)


def read_sections(piece: Piece, text_key: str) -> Iterator[Section]:
    """Read the documents of a piece in order; empty ones are left out.

    Raises:
        SourceError: A file cannot be read, is not UTF-8 text, or a row lacks the text.
    """
    for span in piece:
        try:
            with Path(span.path).open("rb") as file:
                yield from FORMATS[span.format].read(file, span, text_key)
        except OSError as error:
            raise SourceError(
                f"{shown(span.path)} cannot be read: {error.strerror}. Check that it is there and "
                "readable, or take it out of data.source."
            ) from error
