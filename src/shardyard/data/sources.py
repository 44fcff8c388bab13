"""Where text comes from: lists files, cuts them into pieces of equal work, reads documents.

A text file is one document, a JSON-lines file one a line. A piece is the unit of parallel and
resumable work. Cutting needs sizes only: a range of bytes stands for the lines that begin in it, so
no file is read before its turn and a single huge file is shared by all workers.
"""

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardyard.errors import DataError, RequestError

PYTHON_STDLIB = "python-stdlib"
FOLDER_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
"""What a folder contributes; files of any other name are text when they are named one by one."""
SECTION_BYTES = 64 * 1024
"""A text file above this is read in sections of about this size. Sections are held out
one by one, so that a corpus of one book has a held-out part too."""
_UTF8_CONTINUATION = bytes(range(0x80, 0xC0))
_SKIPPED_STDLIB_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus as it was when it was listed."""

    path: str
    name: str
    """Path below the source that named it."""
    size_bytes: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.endswith(".jsonl")


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes [start, stop)."""

    path: str
    start: int
    stop: int
    is_last: bool
    """Whether the file ends here."""


Piece = tuple[Span, ...]


@dataclass(frozen=True)
class Section:
    """A document, or a part of a long one."""

    text: str
    begins: bool
    """Whether the document begins here; if not, it goes on from the section before."""
    ends: bool


def list_files(source: str | Sequence[str]) -> list[SourceFile]:
    """All files of ``data.source`` in a fixed order, none twice.

    Raises:
        RequestError: A path does not exist, or nothing was found.
        DataError: All files are empty.
    """
    entries = [source] if isinstance(source, str) else list(source)
    found: dict[str, SourceFile] = {}
    for entry in entries:
        for path, name in _expand(entry):
            key = str(path.resolve())
            if key not in found:
                stat = path.stat()
                found[key] = SourceFile(key, name, stat.st_size, stat.st_mtime_ns)
    if not found:
        raise RequestError(
            f"data.source={source!r} names no file. Folders contribute files ending in "
            f"{', '.join(FOLDER_SUFFIXES)}. Give a folder, file or glob that holds text."
        )
    files = list(found.values())
    if not any(file.size_bytes for file in files):
        its = "its only file holds" if len(files) == 1 else f"its {len(files)} files hold"
        raise DataError(
            f"data.source={source!r} is an empty corpus: {its} no text. Give files with text."
        )
    return files


def _expand(entry: str) -> Iterator[tuple[Path, str]]:
    if entry == PYTHON_STDLIB:
        yield from _stdlib_files()
        return
    path = Path(entry).expanduser()
    if path.is_dir():
        yield from _folder_files(path)
    elif path.exists():
        yield path, path.name
    elif glob.has_magic(entry):
        for match in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 (absolute globs)
            if Path(match).is_file():
                yield Path(match), match
    else:
        raise RequestError(
            f"data.source={entry!r} does not exist (looked for {path.absolute()}). "
            f"Correct the path, or use {PYTHON_STDLIB} for text that is always there."
        )


def _folder_files(folder: Path, skipped: Collection[str] = ()) -> Iterator[tuple[Path, str]]:
    """Files below a folder, sorted by name; hidden files and folders (.git, .venv) are left out."""
    named: list[tuple[str, Path]] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        paths = [Path(parent, name) for name in names if name[0] != "."]
        named += [
            (path.relative_to(folder).as_posix(), path)
            for path in paths
            if path.suffix in FOLDER_SUFFIXES
        ]
    for name, path in sorted(named):
        if path.is_file():
            yield path, name


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    """The interpreter's own .py files, 12 MB in Python 3.11, without its tests.

    Tests are 60 % of the bytes, some are not UTF-8 on purpose, and Linux distributions leave them
    out: without them the corpus is much the same everywhere and prepared in seconds.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    for path, name in _folder_files(folder, skipped=_SKIPPED_STDLIB_FOLDERS):
        if path.suffix == ".py" and _is_utf8(path):
            yield path, name


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def split_into_pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[Piece]:
    """Cut a corpus into pieces of ``piece_bytes`` to twice that, in order; the last may be less.

    Args:
        piece_bytes: A multiple of ``SECTION_BYTES``, so that no section is cut in two.
    """
    assert piece_bytes % SECTION_BYTES == 0, piece_bytes
    pieces: list[Piece] = []
    spans: list[Span] = []
    filled_bytes = 0
    for file in files:
        for start in range(0, file.size_bytes, piece_bytes):
            stop = min(start + piece_bytes, file.size_bytes)
            spans.append(Span(file.path, start, stop, stop == file.size_bytes))
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
        DataError: A file cannot be read, is not UTF-8 text, or a JSON line lacks the text.
    """
    for span in piece:
        try:
            with Path(span.path).open("rb") as file:
                if span.path.endswith(".jsonl"):
                    yield from _read_jsonl(file, span, text_key)
                else:
                    yield from _read_text(file, span)
        except OSError as error:
            raise DataError(
                f"{span.path} cannot be read: {error.strerror}. Check that it is there and "
                "readable, or take it out of data.source."
            ) from error


def _read_text(file: BinaryIO, span: Span) -> Iterator[Section]:
    for start in range(span.start, span.stop, SECTION_BYTES):
        stop = min(start + SECTION_BYTES, span.stop)
        first_byte, end_byte = _section_border(file, start), _section_border(file, stop)
        file.seek(first_byte)
        content = file.read(end_byte - first_byte)
        if start == 0:
            content = content.removeprefix(codecs.BOM_UTF8)
        text = _decode(content, span.path, first_byte)
        if text:
            yield Section(text, begins=start == 0, ends=span.is_last and stop == span.stop)


def _section_border(file: BinaryIO, offset: int) -> int:
    """Where a section that should end at ``offset`` ends: after the next line end, else space,
    within the bytes of one section, else before the next character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    window = file.read(SECTION_BYTES)
    for separator in (b"\n", b" "):
        found = window.find(separator)
        if found >= 0:
            return offset + found
    rest = window[1:]
    return offset + len(rest) - len(rest.lstrip(_UTF8_CONTINUATION))


def _read_jsonl(file: BinaryIO, span: Span, text_key: str) -> Iterator[Section]:
    file.seek(max(0, span.start - 1))
    if span.start:
        file.readline()  # the line in progress belongs to the span before
    offset = file.tell()
    while offset < span.stop and (line := file.readline()):
        if line.strip():
            text = _text_of_line(line, span.path, offset, text_key)
            if text:
                yield Section(text, begins=True, ends=True)
        offset += len(line)


def _text_of_line(line: bytes, path: str, offset: int, text_key: str) -> str:
    decoded = _decode(line.removeprefix(codecs.BOM_UTF8), path, offset)
    try:
        content = json.loads(decoded)
    except ValueError as error:
        raise DataError(
            f"{_place(path, offset)}: not JSON ({error}). Each line of a .jsonl file is one "
            "object. Mend or remove the line."
        ) from error
    text = content.get(text_key) if isinstance(content, dict) else None
    if isinstance(text, str):
        return text
    if not isinstance(content, dict):
        found = f"a JSON {type(content).__name__}, not an object"
    elif text_key in content:
        found = f"{text_key!r} holds {text!r}, not a string"
    else:
        keys = ", ".join(sorted(content)) or "none"
        found = f"no key {text_key!r} (its keys: {keys})"
    raise DataError(
        f"{_place(path, offset)}: {found}. data.text_key names the key that holds the text. "
        "Correct data.text_key or the line."
    )


def _place(path: str, offset: int) -> str:
    """``file:line`` of a byte offset; reads the file up to there, so only for messages."""
    line_number = 1
    with Path(path).open("rb") as file:
        while offset > 0 and (chunk := file.read(min(offset, 1 << 20))):
            line_number += chunk.count(b"\n")
            offset -= len(chunk)
    return f"{path}:{line_number}"


def _decode(content: bytes, path: str, offset: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {offset + error.start} is not UTF-8, so this is no text file or one in "
            "another encoding. Convert it (`iconv -t utf-8`) or take it out of data.source."
        ) from error
    if "\0" in text:
        raise DataError(
            f"{path}: byte {offset + content.index(0)} is NUL, so this is a binary file. "
            "Take it out of data.source."
        )
    return text
